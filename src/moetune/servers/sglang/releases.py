"""What changed from release to release of SGLang: one table, read from the published wheels.

Every wheel from 0.5.1 to 0.5.23 was read (and 0.4.9); where a rule stands for a release in between
that was never published as a wheel, the older one's behaviour is assumed. `config` below is
`fused_moe_triton_config.py` of a wheel (0.5.1 and before: `fused_moe.py`), `kernels` is
`fused_moe_triton_kernels.py`, `run` is `fused_moe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moetune.domain.errors import ServerError
from moetune.domain.version import Release, parse_release, release_text

OLDEST: Release = (0, 4, 9)
NEWEST: Release = (0, 5, 23)


class Feature(str, Enum):
    """A behaviour that begins with some release and has stayed since."""

    ENVIRONMENT_DIRECTORY = "SGLANG_MOE_CONFIG_DIR names the directory"
    FALLBACK_TO_3_4_0 = "the fixed list of fallbacks begins with 3.4.0"
    DOWN_FILE = "the down kernel has a file of its own"
    DETERMINISTIC = "deterministic inference ignores every file"
    PER_CHANNEL_NAME = "per_channel_quant=True stands in the name that is looked up"
    TILE_SCALES = "a tile that lies in one block scale's columns loads that scale once, not for each column"
    DOWN_LOG = "a missing down file has a log line of its own"
    SMALL_BATCH_PADDING = "fewer rows than experts are padded one block each"
    SWAP_AB = "fp8 dots are transposed on sm_90"
    FUSED_SUM = "a flag has the down kernel add up the topk results of a token"
    WHOLE_BATCH = "calls are no longer cut into chunks of 65,536 tokens"
    FALLBACK_SCAN = "fallbacks are the directories that exist, newest first"
    DOWN_OVERRIDE = "the down BLOCK_SIZE_M follows the up config"
    SMALL_SHARED_MEMORY_DEFAULT = "fp8 default for GPUs below 128 KiB of shared memory"
    DOWN_REUSES_UP = "a missing down file is replaced by the up file in the lookup"
    UP_TMA = "USE_TMA is read from an up file"
    PDL = "launched with programmatic dependent launch"
    PADDING_BY_FOUR = "the padded length is a multiple of four"
    PADDING_SKIPPED = "activation and quantization leave out the padding among rows in sorted order"
    ELSEWHERE_UNTOUCHED = "a sum over topk, and rows in sorted order, get nothing for experts of other ranks"


# Where each was read: `config` get_config_file_name/get_moe_configs/get_default_config/
# try_get_optimal_moe_config; `kernels` should_enable_swap_ab/invoke_fused_moe_kernel;
# `run` fused_experts_impl/_prepare_fused_moe_run; moe_align_block_size.py.
# PER_CHANNEL_NAME: get_config_file_name has the parameter from 0.5.4, but what the server calls
# (try_get_optimal_moe_config) hands it on from 0.5.6 only.
_SINCE: dict[Feature, Release] = {
    Feature.ENVIRONMENT_DIRECTORY: (0, 5, 3),
    Feature.FALLBACK_TO_3_4_0: (0, 5, 3),
    Feature.DOWN_FILE: (0, 5, 5),
    Feature.DETERMINISTIC: (0, 5, 5),
    Feature.TILE_SCALES: (0, 5, 5),
    Feature.PER_CHANNEL_NAME: (0, 5, 6),
    Feature.DOWN_LOG: (0, 5, 6),
    Feature.SMALL_BATCH_PADDING: (0, 5, 7),
    Feature.SWAP_AB: (0, 5, 8),
    Feature.FUSED_SUM: (0, 5, 10),
    Feature.WHOLE_BATCH: (0, 5, 11),
    Feature.FALLBACK_SCAN: (0, 5, 12),
    Feature.DOWN_OVERRIDE: (0, 5, 13),
    Feature.SMALL_SHARED_MEMORY_DEFAULT: (0, 5, 14),
    Feature.DOWN_REUSES_UP: (0, 5, 16),
    Feature.UP_TMA: (0, 5, 18),
    Feature.PDL: (0, 5, 19),
    Feature.PADDING_BY_FOUR: (0, 5, 22),
    Feature.PADDING_SKIPPED: (0, 5, 22),
    Feature.ELSEWHERE_UNTOUCHED: (0, 5, 23),
}

# Triton of the torch that each wheel pins, newest first. Source: METADATA of the sglang wheels
# (torch 2.7.1, 2.8.0, 2.9.1, 2.11.0, 2.13.0, 2.14.1) and of those torch releases.
_TRITON: tuple[tuple[Release, str], ...] = (
    ((0, 5, 22), "3.8.0"),  # torch 2.14.1 asks for ~=3.8.0, which 3.8.1 would satisfy as well
    ((0, 5, 18), "3.7.1"),
    ((0, 5, 11), "3.6.0"),
    ((0, 5, 6), "3.5.1"),
    ((0, 5, 1), "3.4.0"),
    ((0, 0), "3.3.1"),
)

# Package whose folder `configs/` holds the shipped files, newest first.
_HOMES: tuple[tuple[Release, str, str], ...] = (
    ((0, 5, 11), "sglang/srt/layers/moe/moe_runner/triton_utils", "fused_moe_triton_config.py"),
    ((0, 5, 2), "sglang/srt/layers/moe/fused_moe_triton", "fused_moe_triton_config.py"),
    ((0, 0), "sglang/srt/layers/moe/fused_moe_triton", "fused_moe.py"),
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one release.

    Attributes:
        version: as the user gave it, or the newest known.
        release: its numbers.
        assumed: the release is newer than any that was read, so that the newest known rules stand
            in for its own.
    """

    version: str
    release: Release
    assumed: bool = False

    def has(self, feature: Feature) -> bool:
        """Whether this release behaves so."""
        return self.at_least(_SINCE[feature])

    def at_least(self, release: Release) -> bool:
        """Whether this release is that one or a later one."""
        return self.release >= release

    @property
    def default_triton(self) -> str:
        """Triton that comes with this release when nothing else is installed."""
        return next(triton for since, triton in _TRITON if self.at_least(since))

    @property
    def home(self) -> str:
        """Folder inside site-packages whose `configs/` holds the shipped files."""
        return next(home for since, home, _ in _HOMES if self.at_least(since))

    @property
    def module(self) -> str:
        """Path inside site-packages of the module that looks files up."""
        return next(f"{home}/{module}" for since, home, module in _HOMES if self.at_least(since))


def rules_of(version: str | None) -> Rules:
    """The rules of a release; of the newest known when none is given.

    Raises:
        ServerError: for what is no version, or a release older than any that was read.
    """
    if version is None:
        return Rules(release_text(NEWEST), NEWEST)
    text = version.strip()
    release = parse_release(text)
    if release < OLDEST:
        raise ServerError(
            f"SGLang {text} is older than {release_text(OLDEST)}, the first whose rules are known here",
            f"give --server-version {release_text(OLDEST)} or newer (newest known: {release_text(NEWEST)})",
        )
    return Rules(text, release, assumed=release[: len(NEWEST)] > NEWEST)
