"""All commands of the command line, in the order of the help. Each module has one group of commands."""

from collections.abc import Callable

from knnstore.cli.commands.building import add, init, sync
from knnstore.cli.commands.calibrating import calibrate
from knnstore.cli.commands.demonstrating import demo
from knnstore.cli.commands.distributing import commit, encode, plan
from knnstore.cli.commands.evaluating import evaluate
from knnstore.cli.commands.generating import explain, generate, search, translate
from knnstore.cli.commands.listing import adapters, documents, domains, info, show
from knnstore.cli.commands.serving import key_add, key_list, key_revoke, serve
from knnstore.cli.commands.upkeep import erase, move, optimize, remove, repair, tag, upgrade, verify

__all__ = ["COMMANDS", "DATABASE_COMMANDS", "KEY_COMMANDS"]

COMMANDS: dict[str, Callable[..., None]] = {
    "init": init,
    "add": add,
    "sync": sync,
    "eval": evaluate,
    "calibrate": calibrate,
    "generate": generate,
    "translate": translate,
    "explain": explain,
    "search": search,
    "serve": serve,
    "domains": domains,
    "documents": documents,
    "show": show,
    "tag": tag,
    "remove": remove,
    "erase": erase,
    "info": info,
    "move": move,
    "optimize": optimize,
    "verify": verify,
    "repair": repair,
    "encode": encode,
    "commit": commit,
    "plan": plan,
    "adapters": adapters,
    "demo": demo,
}
DATABASE_COMMANDS: dict[str, Callable[..., None]] = {"upgrade": upgrade}
"""Commands of ``knnstore db``."""
KEY_COMMANDS: dict[str, Callable[..., None]] = {"add": key_add, "list": key_list, "revoke": key_revoke}
"""Commands of ``knnstore key``."""
