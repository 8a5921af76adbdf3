"""Judges one config file: what its server makes of the text, and its GPU of each launch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from moetune.applications.config_files import MAX_FILE_BYTES
from moetune.applications.file_meaning import Sizes, gpu_of, meaning_of, why_never_read
from moetune.applications.lint_findings import Judged, finding, key_list
from moetune.domain.config import ConfigTable, KernelConfig, Span
from moetune.domain.errors import ConfigFileError, MoetuneError, UnknownGpuError
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.findings import Finding
from moetune.domain.problem import Kernel, Problem
from moetune.domain.rules import Fault, launch_faults, meetings, uncovered
from moetune.domain.safe_json import JsonDocument, JsonLimits, read_json_object
from moetune.domain.space import dtype_violation
from moetune.domain.text import printable
from moetune.domain.version import parse_release
from moetune.servers.other_kernel import cuda_kernel_fault, cuda_kernel_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moetune.applications.file_meaning import Meaning
    from moetune.domain.gpu import Gpu
    from moetune.domain.launch import Launch
    from moetune.domain.predict import PerformanceModel
    from moetune.servers.protocol import Server

_LIMITS = JsonLimits(max_bytes=MAX_FILE_BYTES)
_MAX_ENTRIES = 4096  # ConfigTable's own limit
FAR_FROM_PREDICTION = 1.3
"""An entry is reported where the server's default is predicted to be this much faster."""


class FileJudge:
    """Judges the files of one server release.

    Args:
        server: the release.
        gpu: what all files are judged for; None: each for the GPU of its name.
        compute_capability: of GPUs that the registry does not know.
        max_m: the largest m that the server can meet.
        sizes: what the names do not say, where a person did.
        model: the performance model; None: nothing is compared with predictions.
    """

    def __init__(
        self,
        server: Server,
        *,
        gpu: Gpu | None = None,
        compute_capability: str | None = None,
        max_m: int,
        sizes: Sizes | None = None,
        model: PerformanceModel | None = None,
    ) -> None:
        self.server, self._gpu, self._max_m = server, gpu, max_m
        self._compute_capability = compute_capability
        self._sizes = sizes or Sizes()
        self._model = model
        self._triton = parse_release(server.triton_version)
        self._faults: dict[tuple[Launch, str], tuple[Fault, ...]] = {}

    def judge(self, file_name: str, where: str, text: bytes, up: ConfigTable | None = None) -> Judged:
        """Judge one file.

        Args:
            file_name: its bare name.
            where: as it is named in findings.
            text: its bytes.
            up: for a `_down` file the entries of the up file beside it.
        """
        return _Judging(self, file_name, where, up).judge(text)

    def faults_of(
        self, problem: Problem, kernel: Kernel, config: KernelConfig, up: KernelConfig | None = None
    ) -> tuple[Fault, ...]:
        """What is wrong with the launch of an entry."""
        try:
            launch = self.server.launch(problem, kernel, config, up)
        except ConfigFileError as error:
            return (Fault("MOE106" if up is not None else "MOE103", error.message),)
        key = (launch, problem.gpu.torch_name)
        if key not in self._faults:
            self._faults[key] = launch_faults(launch, problem.gpu, self._triton)
        return self._faults[key]

    @cached_property
    def drops_triton_version(self) -> bool:
        """Whether the loader takes a `triton_version` key out before it reads numbers."""
        try:
            self.server.read_table('{"triton_version": "3.6.0"}', "probe")
        except ConfigFileError:
            return False
        return True

    def target(self, name: FileName) -> tuple[Gpu, bool]:
        """The GPU that a file is judged for, and whether its limits are known."""
        if self._gpu is not None:
            return self._gpu, True
        return gpu_of(name.device, self._compute_capability)

    def meaning(self, name: FileName, gpu: Gpu) -> Meaning | None:
        """The problem of a file on a GPU."""
        return meaning_of(self.server, name, gpu, self._sizes)

    @property
    def max_m(self) -> int:
        """The largest m that the server can meet."""
        return self._max_m

    @property
    def model(self) -> PerformanceModel | None:
        """The performance model, where entries are compared with it."""
        return self._model


class _Judging:
    """One file on its way through the rules."""

    def __init__(self, judge: FileJudge, file_name: str, where: str, up: ConfigTable | None) -> None:
        self._judge, self._server = judge, judge.server
        self._file_name, self._where, self._up = file_name, where, up
        self._findings: list[Finding] = []
        self._kernel: Kernel = "up"
        self._problem: Problem | None = None
        self._complete = False
        self._keys: tuple[int, ...] = ()

    def judge(self, text: bytes) -> Judged:
        name = parse_file_name(self._file_name)
        if name is not None and name.backend:
            self._say("MOE153", f"it is a file of vLLM's {name.backend} kernel, not of the Triton kernel")
            return Judged(self._file_name, name, findings=tuple(self._findings))
        reason = why_never_read(self._server, self._file_name)
        if reason:
            self._say("MOE131", f"never read: {reason}")
        can_launch = name is not None and self._take_meaning(name)
        document = self._document(text)
        if document is None:
            return Judged(self._file_name, name, self._problem, findings=tuple(self._findings))
        table = self._table(document, text)
        faults = self._launches(table) if can_launch else {}
        self._options(table)
        self._coverage()
        if self._complete and self._judge.model is not None:
            self._predictions(table, faults, self._judge.model)
        return Judged(self._file_name, name, self._problem, table, faults, tuple(self._findings))

    def _say(self, code: str, message: str, keys: Sequence[object] = (), **more: Any) -> None:  # noqa: ANN401
        self._findings.append(finding(code, message, self._where, keys=keys, **more))

    def _take_meaning(self, name: FileName) -> bool:
        """Settle GPU, kernel and problem; whether launches can be judged."""
        gpu, known = self._judge.target(name)
        meaning = self._judge.meaning(name, gpu)
        self._kernel = "down" if name.down and self._server.separate_down_file else "up"
        if meaning is None:
            return False
        self._problem, self._complete = meaning.problem, meaning.complete
        if not known:
            shown = printable(name.device, 80)
            self._say("MOE151", f"no GPU called {shown!r} is known, so that nothing is said about its limits")
            return False
        if gpu.compute_capability is None and gpu.gfx is None:
            self._say("MOE155", f"the limits of {gpu.vendor} GPUs are not known here")
            return False
        return True

    def _document(self, text: bytes) -> JsonDocument | None:
        try:
            document = read_json_object(text, "the file", _LIMITS, ConfigFileError)
            if len(document.value) <= _MAX_ENTRIES:
                return document
            self._say("MOE108", f"it holds {len(document.value)} entries, no config file has {_MAX_ENTRIES}")
        except ConfigFileError as error:
            death = _loader_death(text)
            if death:
                self._say("MOE101", f"{error.message}; the server dies of {death}")
            else:
                self._say("MOE108", error.message)
        return None

    def _table(self, document: JsonDocument, text: bytes) -> ConfigTable:
        if document.duplicate_keys:
            twice = list(dict.fromkeys(document.duplicate_keys))
            self._say("MOE135", f"said twice, and the last one counts: {key_list(twice)}", twice)
        keys: dict[str, int] = {}
        odd: list[str] = []
        for key in document.value:
            if key == "triton_version" and self._judge.drops_triton_version:
                continue
            number = _number(key)
            if number is None:
                odd.append(key)
            else:
                keys[key] = number
        self._keys = tuple(keys.values())
        if odd:
            shown = ", ".join(repr(printable(key, 40)) for key in odd[:6])
            self._say("MOE102", f"the key {shown} is no whole number of tokens: ValueError at load", odd)
        if not keys and not odd:
            self._say(
                "MOE134", "there are no entries: the server says that it uses the file, and uses its default"
            )
        if len(set(keys.values())) < len(keys):
            times = Counter(keys.values())
            same = [key for key, number in keys.items() if times[number] > 1][:64]
            self._say(
                "MOE135", f"one number spelled in two ways, and the last one counts: {key_list(same)}", same
            )
        if not odd:
            try:
                return self._read(text.decode())
            except ConfigFileError:
                pass
        return self._entry_by_entry({key: document.value[key] for key in keys})

    def _read(self, text: str) -> ConfigTable:
        return self._server.read_table(text, self._file_name, self._problem)

    def _entry_by_entry(self, document: Mapping[str, object]) -> ConfigTable:
        """Read each entry on its own, so that every one that the server dies of is named."""
        entries: dict[int, KernelConfig] = {}
        deaths: dict[str, list[str]] = {}
        for key, entry in document.items():
            read = self._read_entry(key, entry)
            if isinstance(read, str):
                deaths.setdefault(read, []).append(key)
            else:
                entries.update(read.entries)
        for what, keys in deaths.items():
            self._say("MOE103", f"{key_list(keys)}: {what}", keys)
        return ConfigTable(tuple(entries.items()))

    def _read_entry(self, key: str, entry: object) -> ConfigTable | str:
        """One entry, or what the server dies of."""
        try:
            return self._read(json.dumps({key: entry}))
        except ConfigFileError as error:
            what = error.message.replace(f"{printable(self._file_name, 400)}: ", "")
            shown = repr(printable(key, 40))
            for start in (f"entry {shown} ", f"the entry {shown} ", f"entry {shown}: "):
                what = what.removeprefix(start)
            return what

    def _entry_faults(self, m: int, config: KernelConfig, span: Span | None) -> tuple[Fault, ...]:
        """An entry's launches at every m that picks it: Triton's, and where few rows come vLLM's own."""
        assert self._problem is not None
        until = cuda_kernel_until(self._server, self._problem)
        first, last = (m, m) if span is None else (span.first, span.last)
        faults: tuple[Fault, ...] = ()
        if last > until:
            faults = self._judge.faults_of(self._problem, self._kernel, config)
        # Without topk it is not known how few tokens bring few rows to an expert.
        if first <= until and self._complete:
            why = cuda_kernel_fault(self._server, self._problem, m, config)
            if why:
                return (Fault("MOE103", f"at m = {first} a CUDA kernel runs, which it ends: {why}"), *faults)
        return faults

    def _launches(self, table: ConfigTable) -> dict[int, tuple[Fault, ...]]:
        assert self._problem is not None
        gpu = self._problem.gpu
        violation = dtype_violation(self._problem.quantization.dtype, gpu)
        if violation is not None:
            self._say("MOE113", violation.text, table.keys(), facts=[("gpu", gpu.torch_name)])
            return {m: (Fault("MOE113", violation.text),) for m, _ in table.entries}
        faults: dict[int, tuple[Fault, ...]] = {}
        try:
            for m, found in self._faults(table):
                faults[m] = tuple(dict.fromkeys((*faults.get(m, ()), *found)))
        except UnknownGpuError as error:
            self._say("MOE151", error.message)
            return {}
        by_code: dict[str, dict[int, str]] = {}
        for m, found in faults.items():
            for fault in found:
                by_code.setdefault(fault.code, {}).setdefault(m, fault.text)
        for code, texts in by_code.items():
            keys = list(texts)
            self._say(code, f"{key_list(keys)}: {texts[keys[0]]}", keys, facts=[("gpu", gpu.torch_name)])
        return faults

    def _faults(self, table: ConfigTable) -> Iterable[tuple[int, tuple[Fault, ...]]]:
        """Each entry's launch; those of the down kernel with every up entry that they meet."""
        assert self._problem is not None
        met: set[int] = set()
        overridden: dict[int, list[tuple[int, int, int]]] = {}
        if self._kernel == "down" and self._up is not None:
            ups, downs = dict(self._up.entries), dict(table.entries)
            for meeting in meetings(self._up, table, max(self._judge.max_m, *table.keys(), 1)):
                up, down = ups[meeting.up_key], downs[meeting.down_key]
                met.add(meeting.down_key)
                found = self._judge.faults_of(self._problem, "down", down, up)
                if up.block_size_m != down.block_size_m:
                    at = (meeting.first, up.block_size_m, down.block_size_m)
                    overridden.setdefault(meeting.down_key, []).append(at)
                yield meeting.down_key, found
        spans = {span.key: span for span in table.spans(max(self._judge.max_m, *table.keys(), 1))}
        for m, config in table.entries:
            if m not in met:
                yield m, self._entry_faults(m, config, spans.get(m))
        self._say_overridden(overridden)

    def _say_overridden(self, overridden: Mapping[int, list[tuple[int, int, int]]]) -> None:
        if not overridden or self._problem is None:
            return
        keys = list(overridden)
        at, of_up, of_down = overridden[keys[0]][0]
        config = KernelConfig(of_down, 64, 64, 1)
        asserts = self._judge.faults_of(self._problem, "down", config, KernelConfig(of_up, 64, 64, 1))
        if any(fault.code == "MOE106" for fault in asserts):
            return  # the launches have said it already
        self._say(
            "MOE144",
            f"{key_list(keys)}: BLOCK_SIZE_M is {of_down} where the up entry has {of_up} (m = {at}); the "
            "server overrides it, so that a config runs that nobody has timed",
            keys,
        )

    def _options(self, table: ConfigTable) -> None:
        if self._problem is None:
            return
        allowed = self._server.allowed_keys(self._problem)
        odd: dict[str, list[int]] = {}
        for m, config in table.entries:
            for key, _ in config.extra:
                if key not in allowed:
                    odd.setdefault(key, []).append(m)
        for key, ms in odd.items():
            self._say("MOE154", f"{key_list(ms)}: {printable(key, 40)} is no parameter of tuned configs", ms)

    def _coverage(self) -> None:
        """By all keys of the file: an entry that ends the server is no gap besides."""
        anything = KernelConfig(16, 16, 16, 1)
        keys = ConfigTable(tuple((m, anything) for m in dict.fromkeys(self._keys)))
        stretches = uncovered(keys, self._judge.max_m)
        if not stretches:
            return
        shown = "; ".join(map(str, stretches[:3])) + ("; and more" if len(stretches) > 3 else "")
        self._say(
            "MOE141",
            f"the server would serve {shown}, not with its default",
            facts=[("uncovered", " ".join(f"{part.first}-{part.last}" for part in stretches[:64]))],
        )

    def _predictions(
        self, table: ConfigTable, faults: Mapping[int, tuple[Fault, ...]], model: PerformanceModel
    ) -> None:
        assert self._problem is not None
        kernels: tuple[Kernel, ...] = ("up", "down")
        if self._server.separate_down_file and (self._kernel == "down" or self._up is not None):
            kernels = (self._kernel,)
        until = cuda_kernel_until(self._server, self._problem)
        slower: dict[int, float] = {}
        for m, config in table.entries:
            if m <= until or any(fault.fatal for fault in faults.get(m, ())):
                continue
            ratio = self._ratio(model, kernels, m, config)
            if ratio is not None and ratio > FAR_FROM_PREDICTION:
                slower[m] = ratio
        if slower:
            worst = max(slower, key=lambda m: slower[m])
            self._say(
                "MOE146",
                f"{key_list(list(slower))}: the server's default is predicted to be faster, at m = {worst} "
                f"by {slower[worst]:.2f} times",
                list(slower),
                cost="predicted, not measured",
            )

    def _ratio(
        self, model: PerformanceModel, kernels: tuple[Kernel, ...], m: int, config: KernelConfig
    ) -> float | None:
        """Predicted time of an entry over that of the default; None where one of them cannot run."""
        assert self._problem is not None
        mine = default = 0.0
        for kernel in kernels:
            other = self._server.default_config(self._problem, kernel, m)
            if any(fault.fatal for fault in self._judge.faults_of(self._problem, kernel, other)):
                return None
            try:
                launches = [self._server.launch(self._problem, kernel, one) for one in (config, other)]
            except MoetuneError:
                return None
            times = model.predict(self._problem, kernel, m, launches).time_us
            mine, default = mine + float(times[0]), default + float(times[1])
        return mine / default


def _number(key: str) -> int | None:
    """What int() makes of a key; None where it raises."""
    try:
        return int(key) if len(key) <= 20 else None
    except ValueError:
        return None


def _loader_death(text: bytes) -> str:
    """The exception of `json.load(f).items()`, empty where there is none."""
    if len(text) > MAX_FILE_BYTES:
        return ""
    try:
        value = json.loads(text.decode())
    except (RecursionError, ValueError) as death:
        return type(death).__name__
    return "" if isinstance(value, dict) else "AttributeError"
