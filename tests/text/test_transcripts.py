"""Completions of several turns: written by hand, and by a model whose scores are computed again from the transcript."""

from functools import partial

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizers import END, character_tokenizer, sentence_tokenizer, tiny_tokenizer

from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextTaskCfg
from groupwise.seeding import derive_seed
from groupwise.text.collector import Dialogue, TextRow, Transcript, score, text_rollout, write
from groupwise.text.envs import TextEnvs
from groupwise.text.generation import Completion, complete
from groupwise.text.policy import CausalLM
from groupwise.text.rewards import RewardFunction, RewardSet
from groupwise.text.task import EncodedPrompt, Example, PromptEncoder, Start
from groupwise.text.tool_env import make_text_env
from groupwise.text.tools import Calculator

CHARACTERS = "0123456789+=<>/calcresut "
SAMPLING = SamplingCfg(max_new_tokens=30, stop=("</calc>",))


class Scripted:
    """Writes by a script, from the text before; notes what it was asked."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.calls = tokenizer, script, []

    def __call__(self, prompts, seeds, sampling, deterministic=False, pasts=None):
        self.calls.append(([self.tokenizer.decode(p) for p in prompts], seeds.tolist(), deterministic))
        return [[self.completion(list(p), int(seed)) for seed in row] for p, row in zip(prompts, seeds, strict=True)]

    def completion(self, prompt, seed):
        text, stop = self.script(self.tokenizer.decode(prompt), seed)
        tokens = self.tokenizer(text)["input_ids"] + ([END] if stop == "eos" else [])
        return Completion(tokens, [-0.5] * len(tokens), stop)


def count(text):
    """A tool that always answers: how many characters there are."""
    return str(len(text))


def calling(text, _):
    """A script of one call, and the end once it is answered."""
    return ("1", "eos") if "<result>" in text else ("<calc>1</calc>", "stop")


def parts(tool=None, *, chat=False, max_turns=2, characters=True, context=None, **settings):
    tokenizer = character_tokenizer(CHARACTERS) if characters else tiny_tokenizer(chat=chat)
    encoder = PromptEncoder(tokenizer, TextTaskCfg(tool="calculator", max_turns=max_turns, **settings))
    envs = TextEnvs(make_text_env(encoder.cfg, tool=tool or Calculator()), "seed")
    return tokenizer, encoder, Dialogue(encoder, context, envs)


def transcripts_at(encoder, prompt, count, group=0, greedy=()):
    example = Example(prompt, {}, Start(0, {"prompt": prompt}))
    encoded = EncodedPrompt(example, tuple(encoder.encode(example)))
    return [Transcript(encoded, group, 10 * group + member, member in greedy) for member in range(count)]


def row_of(transcript, reward=0.0):
    t = transcript
    support, ended = t.support or None, t.stop != "length"
    return TextRow(
        t.prompt.tokens, t.tokens, t.log_probs, reward, ended, t.group, t.turn, support=support, greedy=t.greedy
    )


def of_turn(transcript, number):
    return [token for token, turn in zip(transcript.tokens, transcript.turn, strict=True) if turn == number]


def test_a_call_is_answered_and_the_model_writes_on():
    tokenizer, encoder, dialogue = parts()
    generator = Scripted(
        tokenizer, lambda text, _: ("3", "eos") if "<result>" in text else ("<calc>1+2</calc>", "stop")
    )
    (transcript,) = transcripts_at(encoder, "1+2=", 1)
    write([transcript], generator, SAMPLING, dialogue=dialogue)
    assert [text for (text,), _, _ in generator.calls] == ["1+2=", "1+2=<calc>1+2</calc><result>3</result>"]
    ids = tokenizer("<calc>1+2</calc><result>3</result>3")["input_ids"]
    assert transcript.tokens == [*ids, END]
    # 16 characters called, 18 answered, one and the end written
    assert transcript.turn == [0] * 16 + [-1] * 18 + [1] * 2
    assert transcript.log_probs == [-0.5] * 16 + [0.0] * 18 + [-0.5] * 2
    assert (transcript.turns, transcript.written, transcript.stop) == (2, 18, "eos")
    assert [message["content"] for message in transcript.messages] == ["<calc>1+2</calc>", "3", "3"]
    assert of_turn(transcript, 1) == [*tokenizer("3")["input_ids"], END]
    rollout = text_rollout([row_of(transcript, 1.0)])
    # the prompt has 4 tokens, so that its last slot chooses the first token written
    assert rollout["loss_mask"][0].tolist() == [False] * 3 + [True] * 16 + [False] * 18 + [True] * 2 + [False]
    assert rollout["turn_id"][0].tolist() == [-1] * 3 + [0] * 16 + [-1] * 18 + [1] * 2 + [-1]
    assert rollout["reward"][0].nonzero().tolist() == [[38]]
    assert rollout["terminated"][0].nonzero().tolist() == [[38]]


def test_a_later_turn_keeps_the_space_before_it_which_decoding_it_alone_drops():
    tokenizer = sentence_tokenizer()
    cfg = TextTaskCfg(tool="calculator", max_turns=2, tool_answer="={}")
    envs = TextEnvs(make_text_env(cfg, tool=lambda text: "5" if text.endswith("=") else None), "seed")
    turns = ["1=", "738"]

    def generate(prompts, seeds, *args, **kwargs):
        tokens = tokenizer(turns.pop(0))["input_ids"]
        return [[Completion(tokens, [-0.5] * len(tokens), "stop")]]

    encoder = PromptEncoder(tokenizer, cfg)
    (transcript,) = transcripts_at(encoder, "2", 1)
    write([transcript], generate, SAMPLING, dialogue=Dialogue(encoder, None, envs))
    assert tokenizer.decode(transcript.tokens) == "1= =5 738"
    assert transcript.text == "1==5 738"
    assert [message["content"] for message in transcript.messages] == ["1=", "5", " 738"]


@pytest.mark.parametrize(("max_turns", "turns"), [(1, 1), (5, 5)])
def test_the_answer_to_the_last_turn_is_not_read(max_turns, turns):
    tokenizer, encoder, dialogue = parts(max_turns=max_turns)
    (transcript,) = transcripts_at(encoder, "1=", 1)
    write([transcript], Scripted(tokenizer, lambda *_: ("<calc>1</calc>", "stop")), SAMPLING, dialogue=dialogue)
    assert (transcript.turns, len(transcript.messages), transcript.stop) == (turns, 2 * turns - 1, "stop")
    assert max(transcript.turn) == turns - 1
    assert [of_turn(transcript, t) for t in range(turns)] == [tokenizer("<calc>1</calc>")["input_ids"]] * turns


def test_members_of_a_group_have_as_many_turns_as_they_call_for():
    def script(text, seed):
        return ("<calc>1</calc>", "stop") if text.count("<result>") < calls[seed] else ("1", "eos")

    tokenizer, encoder, dialogue = parts(max_turns=4)
    transcripts = [*transcripts_at(encoder, "1=", 3), *transcripts_at(encoder, "2=", 2, group=1)]
    generator = Scripted(tokenizer, script)
    wanted = dict(zip([transcript.seed for transcript in transcripts], [0, 2, 1, 2, 2], strict=True))
    calls = {_seed_of_turn(a, turn): wanted[a.seed] for a in transcripts for turn in range(4)}
    write(transcripts, generator, SAMPLING, dialogue=dialogue)
    assert [transcript.turns for transcript in transcripts] == [1, 3, 2, 3, 3]
    # first all of both groups; then the two of group 0 that called, which stand at the same text, with both of group 1
    assert [texts for texts, _, _ in generator.calls[:2]] == [["1="], ["2="]]
    assert generator.calls[2][0] == ["1=<calc>1</calc><result>1</result>", "2=<calc>1</calc><result>1</result>"]
    rollout = text_rollout([row_of(transcript) for transcript in transcripts])
    assert rollout["turn_id"].amax(dim=1).tolist() == [0, 2, 1, 2, 2]
    written = [[transcript.turn.count(t) for t in range(3)] for transcript in transcripts]
    assert [[int((row == t).sum()) for t in range(3)] for row in rollout["turn_id"]] == written
    assert written[0] == [2, 0, 0]
    assert written[2] == [14, 2, 0]


def _seed_of_turn(transcript, turn):
    return derive_seed(transcript.seed, "turn", turn)


@pytest.mark.parametrize(("context", "turns", "stop"), [(63, 1, "length"), (64, 2, "eos"), (None, 2, "eos")])
def test_a_completion_without_room_for_another_turn_was_cut(context, turns, stop):
    # prompt 2, call 14, answer 18, and room for 30 more
    tokenizer, encoder, dialogue = parts(context=context)
    (transcript,) = transcripts_at(encoder, "1=", 1)
    write([transcript], Scripted(tokenizer, calling), SAMPLING, dialogue=dialogue)
    assert (transcript.turns, transcript.stop) == (turns, stop)
    assert len(transcript.tokens) == (14 if turns == 1 else 14 + 18 + 2)


def test_an_answer_that_no_context_holds_is_not_encoded(monkeypatch):
    """It would take long, in code that no signal ends."""
    tokenizer, encoder, dialogue = parts(lambda text: "1" * 10**7, context=64)
    (transcript,) = transcripts_at(encoder, "1=", 1)
    monkeypatch.setattr(encoder, "encode_answer", lambda *args, **options: pytest.fail("encoded"))
    write([transcript], Scripted(tokenizer, calling), SAMPLING, dialogue=dialogue)
    assert (transcript.turns, transcript.stop, len(transcript.tokens)) == (1, "length", 14)


@pytest.mark.parametrize(
    ("said", "stop", "ends"),
    [("sum", "eos", [0, -1, 1]), ("sum", "stop", [-1, -1, 1]), ("sum<|im_end|>", "stop", [0, -1, 1])],
    ids=["by the end of text", "without", "by a stop string"],
)
def test_a_chat_model_reads_a_message_and_ends_its_turns_once(said, stop, ends):
    tokenizer, encoder, dialogue = parts(count, chat=True, characters=False)
    (transcript,) = transcripts_at(encoder, "user", 1)
    generator = Scripted(tokenizer, lambda text, _: ("answer", "eos") if "tool" in text else (said, stop))
    write([transcript], generator, SAMPLING, dialogue=dialogue)
    assert tokenizer.decode([*transcript.prompt.tokens, *transcript.tokens]) == (
        "<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\nsum<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\nanswer<|im_end|>"
    )
    # the first end of turn is the model's own only where it wrote it
    assert [turn for token, turn in zip(transcript.tokens, transcript.turn, strict=True) if token == END] == ends


def test_greedy_members_are_written_greedily_in_every_turn():
    tokenizer, encoder, dialogue = parts()
    generator, transcripts = Scripted(tokenizer, calling), transcripts_at(encoder, "1=", 3, greedy={2})
    write(transcripts, generator, SAMPLING, dialogue=dialogue)
    assert [(len(seeds[0]), greedy) for _, seeds, greedy in generator.calls] == [(2, False), (1, True)] * 2
    rollout = text_rollout([row_of(transcript, 1.0) for transcript in transcripts])
    assert rollout["greedy"].any(dim=1).tolist() == [False, False, True]
    assert rollout["loss_mask"].any(dim=1).tolist() == [True, True, False]


def message(role, content):
    return {"role": role, "content": content}


CONVERSATION = [[message("assistant", "sum"), message("tool", "3"), message("assistant", "answer")]]
CONVERSATION += [[message("assistant", "answer")]]
TEXTS = ["sum<result>3</result>answer", "answer"]


@pytest.mark.parametrize(
    ("prompt", "chat", "expected"),
    [("user", False, TEXTS), ("user", True, TEXTS), ((message("user", "number"),), True, CONVERSATION)],
)
def test_of_a_text_rewards_read_a_text_whatever_the_tokenizer_and_of_messages_messages(prompt, chat, expected):
    tokenizer, encoder, dialogue = parts(
        lambda text: count(text) if text == "sum" else None, chat=chat, characters=False
    )
    transcripts, seen = transcripts_at(encoder, prompt, 2), []
    once = _seed_of_turn(transcripts[1], 0)

    def script(text, seed):
        return ("answer", "eos") if "result" in text or "tool" in text or seed == once else ("sum", "eos")

    def reward(completions, **_):
        seen.extend(completions)
        return [float(len(c)) for c in completions]

    write(transcripts, Scripted(tokenizer, script), SAMPLING, dialogue=dialogue)
    score(transcripts, RewardSet([RewardFunction("r", reward)]))
    assert seen == expected
    assert [member.text for member in transcripts] == TEXTS


DIGITS = tuple("0123")
"""Tokens that end a turn."""


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 5}, {"top_k": 64}, {"repetition_penalty": 1.5, "presence_penalty": 1.0}, {"min_new_tokens": 2}],
    ids=["all", "top-k", "all of top-k", "penalties", "minimum"],
)
def test_scores_are_those_of_the_transcript(sampling):
    tokenizer, encoder, dialogue = parts(count, max_turns=3, tool_answer="={}+")
    model = tiny_model(vocab_size=len(tokenizer))
    cfg = SamplingCfg(temperature=0.9, max_new_tokens=6, stop=DIGITS, **sampling)
    policy = CausalLM(model, cfg, tokenizer=tokenizer)
    transcripts = [*transcripts_at(encoder, "12", 6), *transcripts_at(encoder, "345", 6, group=1)]
    write(transcripts, partial(complete, policy), cfg, dialogue=dialogue)
    turns = {transcript.turns for transcript in transcripts}
    assert len(turns) > 1
    assert 3 in turns
    rollout = text_rollout([row_of(transcript) for transcript in transcripts])
    for transcript, row in zip(transcripts, rollout, strict=True):
        _expect_transcript(transcript, row, model, cfg, tokenizer, policy.eos_ids)


def _expect_transcript(transcript, row, model, cfg, tokenizer, eos_ids):
    """Everything in the row again, from the prompt, the turns as texts and the tool."""
    read, turn = list(transcript.prompt.tokens), []
    for number in range(transcript.turns):
        written = of_turn(transcript, number)
        answer = (
            f"={count(tokenizer.decode(written, skip_special_tokens=True))}+" if number < transcript.turns - 1 else ""
        )
        answered = tokenizer(answer)["input_ids"]
        read += written + answered
        turn += [number] * len(written) + [-1] * len(answered)
    valid, prompt = row["valid"], len(transcript.prompt.tokens)
    start = int(valid.nonzero()[0])
    assert row["obs"][start : start + len(read)].tolist() == read
    assert row["action"][valid].tolist() == read[1:]
    assert row["turn_id"][valid].tolist() == [-1] * (prompt - 1) + turn
    assert row["loss_mask"][valid].tolist() == [False] * (prompt - 1) + [t >= 0 for t in turn]
    with torch.no_grad():
        logits = model(torch.tensor([read])).logits[0, prompt - 1 : -1].double()
    for place, scores in enumerate(logits):
        for token in {*read[: prompt + place]}:
            scores[token] *= cfg.repetition_penalty ** (-1 if scores[token] > 0 else 1)
        same_turn = [t == turn[place] for t in turn[:place]]
        for token in {t for t, same in zip(read[prompt : prompt + place], same_turn, strict=True) if same}:
            scores[token] -= cfg.presence_penalty
        if sum(same_turn) < cfg.min_new_tokens:
            scores[list(eos_ids)] = -torch.inf
    logits /= cfg.temperature
    where = torch.tensor(turn) >= 0
    if cfg.top_k:
        kept = logits.topk(min(cfg.top_k, logits.shape[1])).indices.sort().values
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
        support = row["support"][valid][prompt - 1 :]
        assert support[where].tolist() == kept[where].tolist()
        assert (support[~where] == -1).all()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(read[prompt:])[:, None])[:, 0]
    found = row["sample_log_prob"][valid][prompt - 1 :].double()
    torch.testing.assert_close(found[where], expected[where], atol=1e-5, rtol=1e-5)
    assert (found[~where] == 0).all()
