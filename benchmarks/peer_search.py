"""Finds llama.cpp's fastest setting without measuring every one at full length.

Every setting runs at one length, the fastest for either work at a second one. Time per token grows
linearly with the context in both works, so a line through the two points tells how a setting does
at any length. For long cells the first length is the longer one, which their own order resembles
most; the second, short, gives the slope. A warm-up goes before the figures of every setting, and
short runs are the median of three.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cells import Cell
from server_load import Load

if TYPE_CHECKING:
    from llama_cpp_peer import LlamaCpp, PeerSetting

Work = Literal["prefill", "decode"]
WORKS: tuple[Work, ...] = ("prefill", "decode")
FINALISTS = 3  # of either work, at least
NEARLY = 0.8  # of the speed of the last of them: within what one run may be off
SHORT_RUNS = 3
LONG_RUN_S = 0.5  # from here on a run is its own mean
STEPS_BATCH_1, STEPS_BATCHED = 4, 2  # of a short run
SHORT_BATCH_1, LONG_BATCH_1 = 256, 1024
SHORT_BATCHED, LONG_BATCHED = 64, 512
LONG_CELL = 2  # long lengths: from there on the long one comes first
MICRO_BATCHES = (128, 2048)

# setting's name → work → context → tokens per second
Speeds = dict[str, dict[str, dict[str, float]]]


def search_lengths(cell: Cell) -> tuple[int, int]:
    """Prompts of the first round, with all settings, and of the second, with the fastest."""
    short, long = SHORT_BATCH_1, LONG_BATCH_1
    if cell.batch > 1:
        short, long = SHORT_BATCHED, LONG_BATCHED
    if cell.context >= LONG_CELL * long:
        return (long, short)
    if cell.context <= short:
        return (max(1, cell.context // 2), cell.context)
    return (short, min(long, cell.context))


def predicted(points: Mapping[str, float], context: int) -> float:
    """Tokens per second at `context`, from those at one or two lengths."""
    known = sorted((int(length), 1 / speed) for length, speed in points.items())
    (first, seconds), (last, last_seconds) = known[0], known[-1]
    if last == first:
        return 1 / seconds
    slope = max(0.0, (last_seconds - seconds) / (last - first))
    return 1 / (last_seconds + slope * (context - last))


def with_longest(speeds: Speeds, work: Work) -> dict[str, dict[str, float]]:
    """Points of the settings that were measured at the longest length of any.

    What others would do there is not known: one point has no slope.
    """
    measured = {name: points[work] for name, points in speeds.items() if points.get(work)}
    longest = max((int(length) for points in measured.values() for length in points), default=0)
    return {name: points for name, points in measured.items() if str(longest) in points}


def ranking(speeds: Speeds, work: Work, *, context: int) -> list[str]:
    """Settings that were measured at every length, the fastest at `context` first."""
    measured = with_longest(speeds, work)
    most = max((len(points) for points in measured.values()), default=0)
    finalists = [name for name, points in measured.items() if len(points) == most]
    return sorted(finalists, key=lambda name: -predicted(measured[name], context))


def kept(speeds: Speeds, work: Work, *, context: int) -> list[str]:
    """FINALISTS of the ranking, and those nearly as fast as the last of them."""
    order = ranking(speeds, work, context=context)
    found = {name: predicted(speeds[name][work], context) for name in order}
    least = found[order[:FINALISTS][-1]] * NEARLY if order else 0.0
    return [name for name in order if found[name] >= least]


def run_search(peer: LlamaCpp, cell: Cell, *, settings: Sequence[PeerSetting]) -> Speeds:
    """Both rounds for cells like this one."""
    speeds: Speeds = {}
    lengths = search_lengths(cell)
    steps = STEPS_BATCH_1 if cell.batch == 1 else STEPS_BATCHED
    left: Iterable[PeerSetting] = settings
    for length in lengths:
        for setting in left:
            _measure(
                peer,
                replace(cell, context=length, steps=steps),
                setting=setting,
                speeds=speeds,
            )
        names = {name for work in WORKS for name in kept(speeds, work, context=cell.context)}
        left = [setting for setting in settings if setting.name in names]
    if cell.batch == 1:
        best = ranking(speeds, "prefill", context=cell.context)[:1]
        for setting in [s for s in settings if s.name in best]:
            for rows in MICRO_BATCHES:
                wider = replace(setting, micro_batch=rows)
                for length in lengths:
                    _measure(
                        peer, replace(cell, context=length, steps=1), setting=wider, speeds=speeds
                    )
                speeds[wider.name].pop("decode", None)
    return speeds


def _measure(peer: LlamaCpp, cell: Cell, *, setting: PeerSetting, speeds: Speeds) -> None:
    """Adds the figures of one length; a setting that llama.cpp refuses has none."""
    found = speeds.setdefault(setting.name, {work: {} for work in WORKS})
    length = str(cell.context)
    try:
        with peer.context(cell, setting) as context:
            context.warm_up()
            if cell.batch == 1:
                found["prefill"][length] = round(steady(context.prefill), 2)
            else:
                context.fill()
            context.decode(1)
            found["decode"][length] = round(steady(context.decode), 2)
    except RuntimeError as error:
        print(f"left out: {error}")


def steady(run: Callable[[], float]) -> float:
    """Median of SHORT_RUNS runs; the first alone where it is long."""
    begun = time.perf_counter()
    values = [run()]
    if time.perf_counter() - begun < LONG_RUN_S:
        values += [run() for _ in range(SHORT_RUNS - 1)]
    return statistics.median(values)


def setting_named(name: str, settings: Sequence[PeerSetting]) -> PeerSetting:
    """The setting of a name, with the micro-batches that the search adds."""
    for setting in settings:
        for rows in (setting.micro_batch, *MICRO_BATCHES):
            candidate = replace(setting, micro_batch=rows)
            if candidate.name == name:
                return candidate
    raise ValueError(f"peer setting: got {name!r}, wanted one of {[s.name for s in settings]}")


def seconds_of_requests(alone: Speeds, together: Speeds, *, load: Load) -> dict[str, float]:
    """Setting → predicted seconds of a request per client: prompts read one by one, then decoding.

    `alone` and `together` are the searches at batch 1 and with many sequences; settings that lack
    the longest length of either are left out.
    """
    seconds = {}
    middle = load.prompt_tokens + load.answer_tokens // 2
    decodes = with_longest(together, "decode")
    for name, prefill in with_longest(alone, "prefill").items():
        if decode := decodes.get(name):
            reading = load.prompt_tokens / predicted(prefill, load.prompt_tokens)
            seconds[name] = load.clients * (
                reading + load.answer_tokens / predicted(decode, middle)
            )
    return seconds


def best_setting(
    speeds: Any, work: Work, *, context: int, settings: Sequence[PeerSetting]
) -> PeerSetting:
    """The fastest of those that were tried. ValueError when llama.cpp refused all."""
    order = ranking(speeds, work, context=context)
    if not order:
        raise ValueError(f"llama.cpp refused all of {[setting.name for setting in settings]}")
    return setting_named(order[0], settings)
