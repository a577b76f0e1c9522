"""A tool that answers the model, as a dialogue."""

from groupwise.text.prompts import PromptEncoder
from groupwise.text.tools import Tool, ask
from groupwise.text.transcripts import Attempt, Dialogue, Reply
from groupwise.text.turns import AnswerEncoder


class ToolDialogue(Dialogue):
    """Asks the tool after each turn but the last.

    Args:
        max_turns: of the model.
    """

    def __init__(self, tool: Tool, encoder: PromptEncoder, answers: AnswerEncoder, max_turns: int) -> None:
        self._tool = tool
        self._encoder = encoder
        self._answers = answers
        self._max_turns = max_turns

    def reply(self, attempt: Attempt) -> Reply | None:
        """The tool's answer to the attempt's last turn.

        Raises:
            ToolError: it failed.
        """
        if attempt.turns >= self._max_turns:
            return None
        turn = attempt.last_turn()
        answer = ask(self._tool, self._encoder.decode(turn))
        if answer is None:
            return None
        end = turn[-1] if attempt.stop == "eos" else None
        return Reply(answer, self._answers.encode(answer, end))
