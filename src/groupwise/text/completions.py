"""Groups of completions on their way from an agent to an environment and back."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.text.transcripts import Transcript


class Completions(list[Tensor]):
    """Groups of completions: for each of B prompts, token ids ``[G, L]`` of prompt and completion, padded with 0.

    Besides the ids it holds the texts, and what was sampled with each token.
    """

    def __init__(self, groups: Sequence[Sequence[Transcript]]) -> None:
        rows = [[torch.tensor([*member.prompt.tokens, *member.tokens]) for member in group] for group in groups]
        super().__init__(pad_sequence(group, batch_first=True) for group in rows)
        self.groups = groups

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
        for ids, group in zip(self, self.groups, strict=True):
            place = torch.arange(1, ids.shape[1])
            prompt = torch.tensor([len(member.prompt.tokens) for member in group])[:, None]
            written = torch.tensor([len(member.tokens) for member in group])[:, None]
            masks.append((place >= prompt) & (place < prompt + written))
        return masks
