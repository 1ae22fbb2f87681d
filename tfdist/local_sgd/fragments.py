"""Division of a model's weights into fragments that are exchanged in turn."""

from __future__ import annotations

from collections.abc import Sequence


def strided(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Distributes variables over fragments of about equal size, neighbouring variables to different fragments.

    The layers of one fragment are then spread over the whole depth of the model, so that no part of the model is ever
    far behind the others. Streaming DiLoCo calls these strided fragments.

    Args:
        sizes: size of each variable in bytes.
        fragments: number of fragments, at most one for each variable.

    Returns:
        For each fragment, the indices of its variables.

    Raises:
        ValueError: there are fewer variables than fragments.
    """
    if len(sizes) < fragments:
        raise ValueError(
            f"each fragment needs at least one trainable variable; got fragments={fragments} and a model with "
            f"{len(sizes)}"
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    for place, size in enumerate(sizes):
        left = len(sizes) - place
        empty = [part for part in range(fragments) if not parts[part]]
        chosen = min(empty if len(empty) == left else range(fragments), key=lambda part: (loads[part], part))
        parts[chosen].append(place)
        loads[chosen] += size
    return parts
