"""The kernels that are compiled: one case for each launch that differs from those before it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.kernels.triton.report.compile import ARCHES, Launch, Pointer
from tests.kernels.triton.report.figures import Demands
from tests.kernels.triton.report.scenarios import Feature, attention_scenarios, row_scenarios

# kinds of features by which a part of all cases is chosen: codes are made in one kernel, and read in `decode_kernel`,
# which shares that with `prefill_kernel`; of other kernels one case is enough
CHOSEN_BY = {
    "decode_kernel": ("k", "v", "D", "P", "G", "recipe", "run"),
    "prefill_kernel": ("D", "P", "recipe", "run"),
    "quantize_kernel": ("k", "v", "D", "P", "recipe"),
}


@dataclass(frozen=True)
class Case:
    """`features`: what a choice of cases should cover."""

    name: str
    launch: Launch
    demands: Demands
    features: frozenset[tuple[str, ...]]


def all_cases() -> list[Case]:
    """Raises ValueError where two differ in what their names do not say."""
    cases: dict[Launch, Case] = {}
    for scenario in (*attention_scenarios(), *row_scenarios()):
        for launch in scenario.launches():
            if launch not in cases:
                words = list(_words(launch))
                name = " ".join((launch.function, scenario.name, *words))
                cases[launch] = Case(name, launch, demands(launch), frozenset(_features(launch, scenario.features)))
    names = [case.name for case in cases.values()]
    if len(set(names)) < len(names):
        raise ValueError(f"cases that have one name: {sorted({name for name in names if names.count(name) > 1})}")
    return list(cases.values())


def _words(launch: Launch) -> Iterator[str]:
    """Where launches of one kernel in one scenario differ."""
    given = launch.given
    if given.get("OWN_IN_SLOT") is True:
        yield "own slot"
    if "delta" in given:
        yield "alone" if given["delta"] is None else "add"
    if launch.function == "mass_kernel":
        yield f"of {given['R']}"
    if not all(value.is_aligned for value in given.values() if isinstance(value, Pointer)):
        yield "unaligned"


def _features(launch: Launch, scenario: set[Feature]) -> Iterator[tuple[str, ...]]:
    yield (launch.function,)
    if launch.function in CHOSEN_BY:
        yield from ((launch.function, "chip", str(arch)) for arch in ARCHES)
        yield from ((launch.function, *feature) for feature in scenario if feature[0] in CHOSEN_BY[launch.function])


def demands(launch: Launch) -> Demands:
    if launch.function not in ("decode_kernel", "prefill_kernel"):
        return Demands()
    layer = launch.given["layer"]
    # a raw store has no codes: its numbers are loaded by the functions that give tiles, which load nothing else then
    raw = {"load_keys": layer.k.is_raw, "load_values": layer.v.is_raw}
    functions = ("load_codes", "plane", *(name for name, is_raw in raw.items() if is_raw))
    is_decode = launch.function == "decode_kernel"
    return Demands(matrix=True, no_integer_to_float=is_decode, wide_codes=is_decode, codes_from=functions)


def covering(cases: list[Case]) -> list[tuple[Case, int]]:
    """Few cases and chips that together have every feature, and the kernels that matter on every chip. Greedy set
    cover; of equals, what is on the chip with the fewest so far."""
    wanted = frozenset().union(*(_on(case, arch) for case in cases for arch in ARCHES))
    chosen: list[tuple[Case, int]] = []
    while wanted:
        used = Counter(arch for _, arch in chosen)
        arches = sorted(ARCHES, key=lambda arch: used[arch])
        chosen.append(
            max(((case, arch) for arch in arches for case in cases), key=lambda pair: len(_on(*pair) & wanted))
        )
        wanted -= _on(*chosen[-1])
    return chosen


def _on(case: Case, arch: int) -> frozenset[tuple[str, ...]]:
    return case.features - {(case.launch.function, "chip", str(other)) for other in ARCHES if other != arch}
