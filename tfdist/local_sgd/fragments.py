"""The parts of a model's weights that are exchanged in turn."""

from __future__ import annotations

from collections.abc import Sequence


def strided(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Deals variables out to fragments of about equal size, neighbouring ones to different fragments.

    As layers of one fragment are then spread over the whole depth of the model, no part of it is far behind the others
    at any time; strided fragments in the terms of Streaming DiLoCo.

    Args:
        sizes: bytes of each variable.
        fragments: how many, at most one for each variable.

    Returns:
        For each fragment, the places of its variables.

    Raises:
        ValueError: there are fewer variables than fragments.
    """
    if len(sizes) < fragments:
        raise ValueError(
            f"fragments={fragments} of a model with {len(sizes)} trainable variables: a fragment has at least one"
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
