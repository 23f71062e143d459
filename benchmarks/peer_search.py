"""Finds llama.cpp's fastest setting without measuring every one at full length.

Every setting runs with a short prompt, the fastest for either work again with a longer one. Time
per token grows linearly with the context in both works, so a line through the two points tells how
a setting does at any length, and ranks settings that change places on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from our_engine import Cell
from server_load import Load

if TYPE_CHECKING:
    from llama_cpp_peer import LlamaCpp, PeerSetting

Work = Literal["prefill", "decode"]
WORKS: tuple[Work, ...] = ("prefill", "decode")
FINALISTS = 3  # of either work
STEPS_BATCH_1, STEPS_BATCHED = 8, 4
SHORT_BATCH_1, LONG_BATCH_1 = 256, 1024
SHORT_BATCHED, LONG_BATCHED = 64, 512
MICRO_BATCHES = (128, 2048)

# setting's name → work → context → tokens per second
Speeds = dict[str, dict[str, dict[str, float]]]


def search_lengths(cell: Cell) -> tuple[int, ...]:
    """Prompts of the first round, with all settings, and of the second, with the fastest."""
    short, long = SHORT_BATCH_1, LONG_BATCH_1
    if cell.batch > 1:
        short, long = SHORT_BATCHED, LONG_BATCHED
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


def ranking(speeds: Speeds, work: Work, *, context: int) -> list[str]:
    """Settings that were measured to the longest length, the fastest at `context` first."""
    measured = {name: points[work] for name, points in speeds.items() if points.get(work)}
    longest = max((len(points) for points in measured.values()), default=0)
    finalists = [name for name, points in measured.items() if len(points) == longest]
    return sorted(finalists, key=lambda name: -predicted(measured[name], context))


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
        names = {n for w in WORKS for n in ranking(speeds, w, context=cell.context)[:FINALISTS]}
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
    """Adds the figures of one run; a setting that llama.cpp refuses has none."""
    found = speeds.setdefault(setting.name, {work: {} for work in WORKS})
    try:
        with peer.context(cell, setting) as context:
            if cell.batch == 1:
                found["prefill"][str(cell.context)] = round(context.prefill(), 2)
            else:
                context.fill()
            found["decode"][str(cell.context)] = round(context.decode(), 2)
    except RuntimeError as error:
        print(f"left out: {error}")


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

    `alone` and `together` are the searches at batch 1 and with many sequences.
    """
    seconds = {}
    middle = load.prompt_tokens + load.answer_tokens // 2
    for name, points in alone.items():
        decode = together.get(name, {}).get("decode")
        if points.get("prefill") and decode:
            reading = load.prompt_tokens / predicted(points["prefill"], load.prompt_tokens)
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
