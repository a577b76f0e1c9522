"""Groups of completions on their way from an agent to an environment and back."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from groupwise.errors import DataError
from groupwise.text.transcripts import Transcript


class Completions(Sequence[Tensor]):
    """Groups of completions: for each of B prompts, token ids ``[G, L]`` of prompt and completion, padded with 0.

    Besides the ids it holds the texts, and what was sampled with each token.
    """

    def __init__(self, groups: Sequence[Sequence[Transcript]]) -> None:
        self.groups = groups
        self._ids = [_padded([[*member.prompt.tokens, *member.tokens] for member in group]) for group in groups]

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return self._ids[index]

    @property
    def texts(self) -> list[list[str]]:
        """The completions without their prompts and without special tokens."""
        return [[member.text for member in group] for group in self.groups]

    @property
    def tokens(self) -> list[list[list[int]]]:
        """The tokens of each completion, without padding."""
        return [[member.tokens for member in group] for group in self.groups]

    def masks(self) -> list[Tensor]:
        """For each prompt ``[G, L - 1]``: True where the next token is one of the completion."""
        masks = []
        for ids, group in zip(self._ids, self.groups, strict=True):
            place = torch.arange(1, ids.shape[1])
            prompt = torch.tensor([len(member.prompt.tokens) for member in group])[:, None]
            written = torch.tensor([len(member.tokens) for member in group])[:, None]
            masks.append((place >= prompt) & (place < prompt + written))
        return masks


def group_shape(groups: Sequence[Sequence[object]]) -> tuple[int, int]:
    """(B, G); a ``DataError`` if groups differ in size."""
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        raise DataError(f"groups of {sizes[0]} and of {sizes[-1]} completions; fix: equally many for each prompt")
    return len(groups), sizes[0] if sizes else 0


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
