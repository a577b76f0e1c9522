import pytest
from planned import settings

from groupwise.planning.work import work_of


def test_a_step_by_hand(llama):
    work = work_of(settings(llama), ranks=2, prompt=10)
    assert (work.rows, work.written, work.row, work.completion) == (8, 8 * 6, 16, 6)
    assert (work.minibatches, work.epochs, work.scorings, work.sharded) == (1, 1, 0, False)
    assert work.micro_batch == 8 * 16  # everything: less than the preset's 2,048
    assert work.read == 2 * 10 + 8 * 6  # each prompt once
    assert work.micro_batches == 1


def test_small_micro_batches_repeat_prompts(llama):
    # 28 tokens hold a prompt of 10 with 3 of the 4 completions of 6, so each of 2 prompts is read twice
    work = work_of(settings(llama, {"micro_batch_size": 28}), ranks=1, prompt=10)
    assert (work.micro_batch, work.read) == (28, 2 * 2 * 10 + 48)
    assert work.micro_batches == 4


def test_a_micro_batch_holds_a_row_at_least(llama):
    assert work_of(settings(llama, {"micro_batch_size": 3}), ranks=1, prompt=10).micro_batch == 16


def test_sharded_ranks_share_no_prefix(llama):
    cfg = settings(llama, engine="fsdp")
    assert work_of(cfg, ranks=2, prompt=10).read == 8 * (10 + 6)
    assert not work_of(cfg, ranks=1, prompt=10).sharded  # one process has nothing to divide


def test_minibatches_count_tokens_of_all_ranks(llama):
    # 2 ranks write 96 tokens: 3 steps of 32
    work = work_of(settings(llama, {"minibatch_size": 32, "num_epochs": 2}), ranks=2, prompt=10)
    assert (work.minibatches, work.epochs) == (3, 2)
    assert work.scorings == 1  # the scores at the start are those of the first step alone


@pytest.mark.parametrize(
    ("algorithm", "scorings"),
    [({}, 0), ({"kl_coef": 0.1}, 1), ({"num_epochs": 2}, 1), ({"kl_coef": 0.1, "num_epochs": 2}, 2)],
)
def test_scorings(llama, algorithm, scorings):
    assert work_of(settings(llama, algorithm), ranks=1, prompt=10).scorings == scorings


def test_the_mean_completion_is_no_longer_than_the_longest(llama):
    work = work_of(settings(llama), ranks=1, prompt=10, completion=4)
    assert (work.completion, work.longest, work.row, work.written) == (4, 6, 16, 32)
    assert work_of(settings(llama), ranks=1, prompt=10, completion=99).completion == 6


def test_the_longest_prompt_and_all_turns_count_in_a_row(llama):
    task = {"data": "none.jsonl", "max_prompt_tokens": 30, "tool": "calculator", "max_turns": 3}
    assert work_of(settings(llama, task=task), ranks=1, prompt=10).row == 30 + 3 * 6
