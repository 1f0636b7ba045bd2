"""Which gemms are worth the planes that they share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fx_fuser.planning import contest

Gemm = TypeVar("Gemm", bound=Hashable)


@dataclass(frozen=True)
class Offer:
    """A gemm's ms by the library, and from planes that are made; which planes these are."""

    library: float
    ours: float
    planes: frozenset[Hashable]

    @property
    def gain(self) -> float:
        return self.library - self.ours


def chosen(offers: Mapping[Gemm, Offer], costs: Mapping[Hashable, float]) -> set[Gemm]:
    """Those that together gain clearly over the library, planes included. costs: ms of each plane.

    A gemm goes that gains less than the planes cost that it alone reads, until none does; then what
    is connected by planes stays or goes as a whole. That is not always the best choice: two gemms
    that share a plane too dear for either stay only where they pay for it together.
    """
    kept = {gemm: offer for gemm, offer in offers.items() if offer.gain > 0}
    while True:
        readers: dict[Hashable, int] = {}
        for offer in kept.values():
            for plane in offer.planes:
                readers[plane] = readers.get(plane, 0) + 1
        left = {
            gemm
            for gemm, offer in kept.items()
            if offer.gain <= sum(costs[p] for p in offer.planes if readers[p] == 1)
        }
        if not left:
            break
        kept = {gemm: offer for gemm, offer in kept.items() if gemm not in left}
    return {gemm for group in _connected(kept) if _gains(group, costs) for gemm in group}


def _connected(kept: Mapping[Gemm, Offer]) -> list[dict[Gemm, Offer]]:
    groups: list[tuple[set[Hashable], dict[Gemm, Offer]]] = []
    for gemm, offer in kept.items():
        planes, members = set(offer.planes), {gemm: offer}
        apart = []
        for group in groups:
            if group[0] & planes:
                planes |= group[0]
                members = {**group[1], **members}
            else:
                apart.append(group)
        groups = [*apart, (planes, members)]
    return [members for _, members in groups]


def _gains(group: Mapping[Gemm, Offer], costs: Mapping[Hashable, float]) -> bool:
    planes = {plane for offer in group.values() for plane in offer.planes}
    ours = sum(offer.ours for offer in group.values()) + sum(costs[plane] for plane in planes)
    return contest.gains(ours, sum(offer.library for offer in group.values()))
