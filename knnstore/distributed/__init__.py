"""Adding documents with several processes or machines: plan, encode, commit.

`make_plan` divides documents into shards and reserves their positions in the store. `encode_shards` computes
the keys of shards; it needs the folder of the plan and the model, but no database. `commit_plan` adds all
shards to the store in one transaction. Readers see nothing of a plan before that.
"""

from knnstore.distributed.committing import Committed, commit_plan, drop_plan
from knnstore.distributed.encoding import Encoding, ShardEncoder, encode_shards
from knnstore.distributed.plan_folder import Plan, PlanFolder, Shard
from knnstore.distributed.planning import SHARD_TOKENS, make_plan
from knnstore.distributed.uploading import ShardUploader
from knnstore.distributed.worker_processes import encode_shards_in_processes

__all__ = [
    "SHARD_TOKENS",
    "Committed",
    "Encoding",
    "Plan",
    "PlanFolder",
    "Shard",
    "ShardEncoder",
    "ShardUploader",
    "commit_plan",
    "drop_plan",
    "encode_shards",
    "encode_shards_in_processes",
    "make_plan",
]
