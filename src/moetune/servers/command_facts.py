"""What a server's command line says about the model, its split and the MoE runner.

The spellings of the flags stand in the table of flags (`roles` of `servers/data/{server}_flags.json`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moetune.domain.problem import Parallelism
from moetune.servers.command_options import flag_of
from moetune.servers.flag_data import FlagBook
from moetune.servers.flags import ABSENT, GIVEN, Setting, book_of, settings_of
from moetune.servers.protocol import ServerOptions
from moetune.servers.runner_facts import flag

_LARGEST = 65_536
_SERVE = "serve"
# All-to-all backends that spread the experts over all ranks, whatever --ep-size says
# (sglang 0.5.23 srt/arg_groups/moe_hook.py: handle_a2a_moe).
_SPREADING = frozenset({"deepep", "deepep_v2", "mooncake", "nixl", "mori", "pplx", "ascend_fuseep"})


@dataclass(frozen=True, slots=True)
class CommandFacts:
    """What a command says; what it does not say has the server's own default, and 0 or empty without one.

    Attributes:
        model: id or path.
        parallelism: sizes as `Problem` needs them.
        pipeline: ranks of the pipeline.
        nodes: that the server runs on.
        port: 0 when it is not said, or chosen for each start.
        host: address that it listens on.
        prefill_chunk: most tokens of a prefill step, 0 when it is not said.
        options: of its MoE runner.
        settings: its flags in the table's spelling.
        environment: its variables, those left out that are taken out.
    """

    model: str = ""
    parallelism: Parallelism = field(default_factory=Parallelism)
    pipeline: int = 1
    nodes: int = 1
    port: int = 0
    host: str = ""
    prefill_chunk: int = 0
    options: ServerOptions = field(default_factory=ServerOptions)
    settings: tuple[Setting, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def read_command(
    server: str, arguments: Sequence[str], environment: Mapping[str, str], version: str = ""
) -> CommandFacts:
    """Read the command of a server; of one whose flags are not known nothing is read.

    Args:
        server: `sglang`, `vllm` or another.
        arguments: of its process.
        environment: its variables; empty values are variables taken out.
        version: its release; empty: the newest known.
    """
    book = book_of(server)
    variables = {name: value for name, value in environment.items() if value}
    if book is None:
        return CommandFacts(environment=variables)
    settings = settings_of(server, arguments, version)
    given = _Given(book, settings)
    port = given.text("port")
    return CommandFacts(
        model=given.text("model") or _served(arguments),
        parallelism=_split(server, given),
        pipeline=given.number("pp", 1),
        nodes=given.number("nnodes", 1),
        port=int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0,
        host=given.text("host"),
        prefill_chunk=given.number("prefill_chunk", 0),
        options=ServerOptions(
            moe_runner_backend=given.text("runner_backend").lower().replace("-", "_") or "auto",
            moe_a2a_backend=given.text("a2a").lower() or "none",
            quantization=given.text("quantization") or None,
            deterministic=given.on("deterministic") or bool(flag(variables, "VLLM_BATCH_INVARIANT")),
            disable_shared_experts_fusion=given.on("no_shared_fusion"),
            enable_lora=given.on("lora"),
            fused_moe_sum=given.on("fused_sum"),
            environment=variables,
        ),
        settings=settings,
        environment=variables,
    )


def command_words(book: FlagBook, facts: CommandFacts) -> dict[str, str]:
    """Every flag and variable of the table to its value in a command, `absent` where it has none."""
    words = dict.fromkeys((name for name in book.facts if name.startswith("--")), ABSENT)
    words |= {name: ABSENT for name in book.flags if not name.startswith("-")}
    words |= {setting.name: setting.value for setting in facts.settings}
    return words | {name: value for name, value in facts.environment.items() if name in book.flags}


@dataclass(frozen=True, slots=True)
class _Given:
    book: FlagBook
    settings: tuple[Setting, ...]

    def text(self, role: str) -> str:
        names = self.book.roles.get(role, ())
        value = next((one.value for one in reversed(self.settings) if one.name in names), "")
        return "" if value == GIVEN or value.startswith("{") else value

    def on(self, role: str) -> bool:
        names = self.book.roles.get(role, ())
        return any(one.name in names and one.value.lower() not in ("false", "0") for one in self.settings)

    def number(self, role: str, default: int) -> int:
        text = self.text(role)
        good = text.isascii() and text.isdigit() and len(text) < 9
        return int(text) if good and int(text) > 0 else default


def _split(server: str, given: _Given) -> Parallelism:
    tp = min(given.number("tp", 1), _LARGEST)
    dp = min(given.number("dp", 1), _LARGEST)
    redundant = min(given.number("redundant_experts", 0), _LARGEST)
    if server == "vllm":
        return Parallelism(tp, 2 if given.on("expert_parallel") else 1, dp, redundant)
    ep = min(given.number("ep", 1), _LARGEST)
    if given.text("a2a").lower() in _SPREADING:
        ep = tp
    # Data parallelism of SGLang shares the ranks of the experts: it is none of theirs.
    return Parallelism(tp, ep, 1, redundant)


def _served(arguments: Sequence[str]) -> str:
    """The model of `vllm serve MODEL`."""
    for at, word in enumerate(arguments[:-1]):
        if word == _SERVE and not flag_of(arguments[at + 1]):
            return arguments[at + 1]
    return ""
