"""Steps of a group that saw the same observation."""

import torch
from tensordict import TensorDict

from groupwise.algorithms.advantages import anchors


def test_anchors_are_of_one_group_and_of_members_only():
    group_id = torch.tensor([[0, 0, 1, 1], [0, 0, 1, -1]])
    obs = torch.tensor([[1, 2, 1, 2], [2, 2, 1, 1]])[..., None]
    member = torch.ones(2, 4).bool()
    member[1, 1], member[1, 3] = False, False
    ids, number = anchors(obs, group_id, member)
    assert number == 4
    assert ids.tolist() == [[0, 1, 2, 3], [1, -1, 2, -1]]
    nested = TensorDict({"b": obs, "a": {"image": torch.zeros(2, 4, 3, 3)}}, batch_size=[2, 4])
    assert torch.equal(anchors(nested, group_id, member)[0], ids)
    nested["a", "image"][1, 0, 2, 2] = 1.0
    assert anchors(nested, group_id, member)[0].tolist() == [[0, 1, 2, 3], [4, -1, 2, -1]]
    assert anchors(torch.tensor([[1e-9, 2e-9, 1e-9]]), torch.zeros(1, 3).long(), torch.ones(1, 3).bool())[1] == 2
    nobody, number = anchors(nested, group_id, member & False)
    assert (number, nobody.tolist()) == (0, [[-1] * 4] * 2)
