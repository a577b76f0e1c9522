"""What attempts are worth: their tokens as the completions that reward functions read."""

from collections.abc import Sequence

from groupwise.text.data import Completion
from groupwise.text.metrics import Scored
from groupwise.text.prompts import PromptEncoder
from groupwise.text.rewards import RewardSet, TrainingState
from groupwise.text.transcripts import Attempt
from groupwise.text.turns import as_messages


def score(
    attempts: Sequence[Attempt], rewards: RewardSet, encoder: PromptEncoder, state: TrainingState | None = None
) -> list[Scored]:
    """The attempts with their texts and rewards.

    Raises:
        RewardError: a reward function failed.
    """
    examples = [attempt.prompt.example for attempt in attempts]
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns = {name: [example.columns.get(name) for example in examples] for name in names}
    texts = [text_of(attempt, encoder) for attempt in attempts]
    completions = [_completion(attempt, text, encoder) for attempt, text in zip(attempts, texts, strict=True)]
    ids = [attempt.tokens for attempt in attempts]
    scores = rewards.score([example.prompt for example in examples], completions, ids, columns, state)
    return [
        Scored(attempt, text, reward, parts)
        for attempt, text, reward, *parts in zip(attempts, texts, scores.reward, *scores.parts, strict=True)
    ]


def text_of(attempt: Attempt, encoder: PromptEncoder) -> str:
    """All that was written, with the answers in between as they stand in a text."""
    if not attempt.answers:
        return encoder.decode(attempt.tokens)
    answers = [encoder.inline(answer) for answer in attempt.answers]
    return "".join(part for pair in zip(_turns(attempt, encoder), [*answers, ""], strict=True) for part in pair)


def _completion(attempt: Attempt, text: str, encoder: PromptEncoder) -> Completion:
    if isinstance(attempt.prompt.example.prompt, str) or not attempt.answers:
        return text
    return as_messages(_turns(attempt, encoder), attempt.answers)


def _turns(attempt: Attempt, encoder: PromptEncoder) -> list[str]:
    return [encoder.decode(attempt.of_turn(number)) for number in range(attempt.turns)]
