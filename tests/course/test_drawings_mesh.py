"""The drawings of chapter 20: meshes of four and eight ranks."""

import numpy as np
from svg import read, texts, with_class

MESH = np.arange(4).reshape(2, 2)  # as init_device_mesh numbers its ranks: data, tensor


def frame(element):
    return [float(element.get(key)) for key in ("x", "y", "width", "height")]


def test_a_row_is_a_tensor_group_and_a_column_a_data_group():
    drawing = read("mesh_groups")
    place = {int(rank.text): (float(rank.get("x")), float(rank.get("y")))
             for rank in with_class(drawing, "rank")}
    for name, expected in [("tensor-group", MESH.tolist()), ("data-group", MESH.T.tolist())]:
        found = []
        for x, y, width, height in map(frame, with_class(drawing, name)):
            found.append([rank for rank in sorted(place) if x < place[rank][0] < x + width
                          and y < place[rank][1] < y + height])
        assert found == expected
    said = texts(drawing)
    for examples in np.split(np.arange(12), 2):
        assert f"same examples {examples[0]}–{examples[-1]}" in said


def test_an_edge_of_the_cube_joins_ranks_that_differ_in_one_dimension():
    drawing = read("mesh_of_eight")
    mesh = np.arange(8).reshape(2, 2, 2)  # as in train_transformer.py: data, pipeline, tensor
    place, middles = {}, {}
    for rank in with_class(drawing, "rank"):
        place[float(rank.get("x")), float(rank.get("y")) - 8] = int(rank.text)
    for axis, name in enumerate(["data", "pipeline", "tensor"]):
        found = []
        for edge in with_class(drawing, "edge"):
            if edge.get("data-dimension") == name:
                x1, y1, x2, y2 = (float(edge.get(key)) for key in ("x1", "y1", "x2", "y2"))
                found.append([place[x1, y1], place[x2, y2]])
                if 0 in found[-1]:
                    middles[name] = complex((x1 + x2) / 2, (y1 + y2) / 2)
        expected = np.moveaxis(mesh, axis, -1).reshape(4, 2).tolist()
        assert sorted(found) == sorted(expected)
    groups = with_class(drawing, "group")
    assert len(groups) == 3
    for group in groups:  # its name is at that edge of rank 0
        at = complex(float(group.get("x")), float(group.get("y")))
        nearest = min(middles, key=lambda name: abs(middles[name] - at))
        assert nearest == group.get("data-dimension") and group.text == f"{nearest} group"
