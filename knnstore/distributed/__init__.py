"""Adding documents with several processes or machines: plan, encode, commit.

A plan is a list of documents in a folder, divided into shards. `make_plan` writes the plan and reserves
positions in the store for its documents. `encode_shards` computes the keys of shards; it needs the folder of
the plan and the model, but no database. `commit_plan` adds all shards to the store in one transaction.
Readers do not see the documents before that.
"""

from knnstore.distributed.committing import Committed, commit_plan, drop_plan
from knnstore.distributed.encoding import Encoding, ShardEncoder, ShardUploader, encode_shards
from knnstore.distributed.plan_folder import Plan, PlanFolder, Shard
from knnstore.distributed.planning import SHARD_TOKENS, make_plan
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
