"""The recipes that `quire calibrate` makes, as what may be chosen for each layer. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import StartupError
from engine.study.forms import Form, Geometry, Option
from kernels.format.codec import Centred, Integer, Parameters, Quantizer, Table

TABLE_BITS = (4, 3, 2)
SEARCH = "mixed"
UNIFORM = tuple(f"nuq{bits}{suffix}" for suffix in ("", "_rot") for bits in TABLE_BITS)
CALIBRATED_NAMES = (*UNIFORM, SEARCH)

Tables = Mapping[Form, Mapping[int, Table]]
Stored = tuple[Quantizer, int | None, Parameters, float]
"""Codec, group, parameters, clip."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """`fixed`: options that need no calibration. `table_forms`: forms that codebooks of `table_bits` are fitted for."""

    fixed: tuple[Option, ...]
    table_forms: tuple[Form, ...]
    table_bits: tuple[int, ...]

    def options(self, tables: Tables) -> list[Option]:
        """All that may be chosen for a layer with these codebooks."""
        fitted = [Option(form, tables[form][bits]) for form in self.table_forms for bits in self.table_bits]
        return [*self.fixed, *fitted]

    def cheapest_bits(self, geometry: Geometry) -> float:
        """Bits per element, of K and V together, of the smallest options."""
        blank = {bits: Table.nearest(tuple(float(n) for n in range(1 << bits))) for bits in self.table_bits}
        options = self.options(dict.fromkeys(self.table_forms, blank))
        sizes = [min(geometry.num_bytes(o) for o in options if o.form.is_key is is_key) for is_key in (True, False)]
        return 8 * sum(sizes) / (2 * geometry.num_elements)


def _can_pack(bits: int, head_dim: int) -> bool:
    """Whether codes of a head's channels fill whole bytes; three bits lie in planes of two and of one."""
    return head_dim % (8 if bits == 3 else 8 // bits) == 0


def uniform(name: str, *, has_k_bias: bool, head_dim: int) -> Candidates:
    """One form and one width everywhere. `nuqN`: KVQuant's, K before RoPE, nothing rotated. `nuqN_rot`: codebooks on
    rotated numbers, K after RoPE and divided by its norm, unless a bias on K forbids to rotate it.

    Raises StartupError where codes do not fill bytes.
    """
    is_rotated, bits = name.endswith("_rot"), int(name[3])
    if not _can_pack(bits, head_dim):
        raise StartupError(f"--recipe {name}: {head_dim} codes of {bits} bits, one a channel, do not fill whole bytes")
    rotates_k = is_rotated and not has_k_bias
    key = Form(True, is_rotated=rotates_k, before_rope=not rotates_k)
    return Candidates((), (key, Form(False, is_rotated=is_rotated)), (bits,))


def searched(name: str, *, head_dim: int) -> Candidates:
    """What a search chooses from: K and V rotated or not, K before RoPE or after, 8 to 2 bits. `nuqN` knows codebooks
    below 8 bits, `mixed` integers as well."""
    bases = [(True, is_rotated, before) for is_rotated in (False, True) for before in (False, True)]
    bases += [(False, is_rotated, False) for is_rotated in (False, True)]
    fixed: list[Option] = []
    for is_key, is_rotated, before in bases:
        stores: Sequence[Stored] = [(Integer(8), None, Parameters.HALF, 1.0)]
        if name == SEARCH:
            stores = [*stores, *_integers(is_rotated and not is_key)]
        fixed += [
            Option(Form(is_key, is_rotated, before, group, kept, clip), codec)
            for codec, group, kept, clip in stores
            if _can_pack(codec.bits, head_dim)
        ]
    widths = tuple(bits for bits in TABLE_BITS if _can_pack(bits, head_dim))
    return Candidates(tuple(fixed), tuple(Form(*basis) for basis in bases), widths)


def _integers(is_symmetric: bool) -> list[Stored]:
    """Stores below 8 bits: small groups with 8-bit parameters pay from 4 bits down, clipping at 2 bits."""
    half, byte = Parameters.HALF, Parameters.BYTE
    found: list[Stored] = [
        (Integer(4), None, half, 1.0),
        (Integer(4), 32, byte, 1.0),
        (Integer(3), None, half, 1.0),
        (Integer(3), 32, byte, 1.0),
        (Integer(2), None, half, 1.0),
        (Integer(2), 32, byte, 1.0),
        (Integer(2), 32, byte, 0.9),
        (Integer(2), 16, byte, 1.0),
    ]
    if is_symmetric:  # rotated V needs no zero, and one scale a head
        found += [(Centred(3), 32, byte, 1.0), (Centred(2), 32, byte, 0.9), (Centred(2), None, byte, 0.8)]
    return found
