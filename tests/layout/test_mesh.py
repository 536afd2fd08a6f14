"""The mesh: places, ranks and groups agree with each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.layout.mesh import Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda lengths: Mesh(tuple(zip("abcd", lengths, strict=False)))
)


def test_copies_of_a_stage_are_neighbours() -> None:
    mesh = Mesh((("pipeline", 2), ("data", 3)))
    assert mesh.size == 6
    assert mesh.coordinate(4) == {"pipeline": 1, "data": 1}
    assert mesh.rank(pipeline=1, data=1) == 4
    assert mesh.group(4, "data") == (3, 4, 5)
    assert mesh.group(4, "pipeline") == (1, 4)
    assert mesh.groups("data") == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups("pipeline") == ((0, 3), (1, 4), (2, 5))
    assert str(mesh) == "pipeline 2 x data 3"


@given(meshes)
def test_a_rank_is_its_place(mesh: Mesh) -> None:
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(**place) for place in places] == list(range(mesh.size))
    assert len({tuple(place.items()) for place in places}) == mesh.size


@given(meshes)
def test_groups_share_every_other_coordinate_and_hold_each_rank_once(mesh: Mesh) -> None:
    for axis, length in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert all(len(group) == length for group in groups)
        for group in groups:
            for at, rank in enumerate(group):
                assert mesh.group(rank, axis) == group
                assert mesh.coordinate(rank) == {**mesh.coordinate(group[0]), axis: at}


def test_what_is_not_on_the_mesh_is_refused() -> None:
    mesh = Mesh((("pipeline", 2), ("data", 3)))
    with pytest.raises(ValueError, match=r"rank 6 is not on the mesh; its ranks are 0\.\.5"):
        mesh.coordinate(6)
    with pytest.raises(ValueError, match="axis 'data' has 3 ranks"):
        mesh.rank(data=3)
    for call in (lambda: mesh.group(0, "tensor"), lambda: mesh.groups("tensor"), lambda: mesh.rank(tensor=0)):
        with pytest.raises(ValueError, match="no axis 'tensor'; the axes are pipeline, data"):
            call()
    with pytest.raises(ValueError, match="named twice"):
        Mesh((("data", 2), ("data", 2)))
    with pytest.raises(ValueError, match="0 ranks long"):
        Mesh((("data", 0),))
