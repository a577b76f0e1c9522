import pytest
from planned import BODY, HEAD, ROUND, WHOLE, planned, settings

from groupwise.planning.gpus import GPUS
from groupwise.planning.seconds import forward_flops, training_flops
from groupwise.planning.sizes import sizes_of

ALL = 18_080
ATTENTION = 4 * 2 * 32
"""Operations of a token for each one that it attends to."""


def test_operations_by_hand(llama):
    sizes = sizes_of(settings(llama).model)
    assert forward_flops(sizes, 10) == 2 * (15_360 + 1_280) + 2_560 == 35_840
    assert training_flops(sizes, 10, recompute=False) == 6 * 15_360 + 8 * 1_280 + 3 * 2_560 == 110_080
    assert training_flops(sizes, 10, recompute=True) == 8 * 15_360 + 8 * 1_280 + 4 * 2_560 == 143_360


def test_frozen_weights_have_no_gradient_of_their_own(llama):
    sizes = sizes_of(settings(llama, model={"lora": {"r": 2}}).model)
    assert training_flops(sizes, 0, recompute=False) == 4 * sizes.body + 2 * sizes.trained_body + 4 * HEAD


def test_the_usual_rules_hold_for_a_large_model_without_attention(llama):
    """2 N and 6 N, of all that is multiplied."""
    sizes = sizes_of(settings(llama).model)._replace(head=0)
    assert forward_flops(sizes, 0) == 2 * sizes.body
    assert training_flops(sizes, 0, recompute=False) == 6 * sizes.body


def test_a_step_by_hand(llama):
    # 68 tokens are read, in texts of 16, at 100 operations a second
    found = planned(settings(llama, {"kl_coef": 0.1})).seconds
    training = 6 * BODY + 8 * HEAD + 3 * ATTENTION * 8
    assert found["update"] == pytest.approx(68 * training / 100)
    assert found["scoring"] == pytest.approx(68 * (2 * (BODY + HEAD) + ATTENTION * 8) / 100)
    assert found["publishing"] == 0


def test_decoding_waits_for_memory_or_for_products(llama):
    # prompts: 2 of 10 tokens. 6 steps read all weights; 48 tokens read the cache of 13, 64 numbers a token
    cfg = settings(llama)
    prefill = 20 * (2 * (BODY + HEAD) + ATTENTION * 5)
    memory = 6 * 4 * (BODY + HEAD) + 48 * 13 * 64 * 4
    products = 48 * (2 * (BODY + HEAD) + ATTENTION * 13)
    slow_memory = ROUND._replace(float32=1e6, bandwidth=1.0)
    found = planned(cfg, gpu=slow_memory).seconds["generation"]
    assert found == pytest.approx(prefill / 1e6 + memory)
    slow_products = ROUND._replace(bandwidth=1e9)
    assert planned(cfg, gpu=slow_products).seconds["generation"] == pytest.approx((prefill + products) / 100)


def test_operations_of_a_small_model_wait_to_be_launched(llama):
    fast = ROUND._replace(float32=1e18, bandwidth=1e18)
    launching = WHOLE._replace(launch=0.5, operations=20)
    # 6 steps of 2 layers
    assert planned(settings(llama), gpu=fast, assumed=launching).seconds["generation"] == pytest.approx(
        6 * 2 * 20 * 0.5
    )
    served = settings(llama, generation={"name": "server"})
    assert planned(served, gpu=fast, assumed=launching).seconds["generation"] == pytest.approx(0, abs=1e-6)


def test_precision_chooses_the_rate(llama):
    half = planned(settings(llama, model={"precision": "bfloat16"})).seconds["update"]
    assert planned(settings(llama)).seconds["update"] == pytest.approx(10 * half)


def test_gradients_are_summed_around_a_ring(llama):
    # 4 ranks, links of 50 bytes a second: 2 * 3/4 of the gradients, in each of 2 epochs
    fast = ROUND._replace(float32=1e18)
    cfg = settings(llama, {"num_epochs": 2})
    assert planned(cfg, gpus=4, gpu=fast).seconds["update"] == pytest.approx(2 * 2 * 0.75 * 4 * ALL / 50)


def test_sharded_ranks_fetch_the_weights_for_each_pass(llama):
    fast = ROUND._replace(float32=1e18)
    cfg = settings(llama, {"kl_coef": 0.1, "micro_batch_size": 32}, engine="fsdp")
    plan = planned(cfg, gpus=2, gpu=fast)
    assert plan.work.micro_batches == 4  # 8 rows of 16 tokens, 32 at a time
    whole, gradients = 4 * ALL / 2 / 50, 4 * ALL / 2 / 50
    assert plan.seconds["update"] == pytest.approx(4 * (2 * whole + gradients))
    assert plan.seconds["scoring"] == pytest.approx(4 * whole)
    assert plan.seconds["publishing"] == pytest.approx(whole)


def test_the_slower_of_exchange_and_products_counts(llama):
    fast = ROUND._replace(link=1e18)
    cfg = settings(llama, engine="fsdp")
    assert planned(cfg, gpus=2, gpu=fast).seconds["update"] == pytest.approx(
        128 * training_flops(sizes_of(cfg.model), 8, recompute=False) / 100
    )


def test_more_ranks_than_a_machine_has_use_the_network(llama):
    fast = ROUND._replace(float32=1e18)
    slow = WHOLE._replace(network=1.0, per_machine=2)
    cfg = settings(llama)
    assert planned(cfg, gpus=2, gpu=fast, assumed=slow).seconds["update"] == pytest.approx(2 * 0.5 * 4 * ALL / 50)
    assert planned(cfg, gpus=4, gpu=fast, assumed=slow).seconds["update"] == pytest.approx(2 * 0.75 * 4 * ALL)


def test_servers_share_the_prompts_and_get_the_weights_by_disk(llama):
    two = {"name": "server", "urls": ["http://a:1", "http://b:1"]}
    fast = ROUND._replace(float32=1e18, bandwidth=1.0)
    found = planned(settings(llama, generation=two), gpu=fast).seconds
    # each writes 24 tokens, in 6 steps
    assert found["generation"] == pytest.approx(6 * 4 * (BODY + HEAD) + 24 * 13 * 64 * 4)
    assert found["publishing"] == pytest.approx(2 * 4 * ALL / 10)
    adapters = planned(settings(llama, generation=two, model={"lora": {"r": 2}}), gpu=fast).seconds["publishing"]
    assert adapters == pytest.approx(2 * 4 * 1856 / 10)  # the adapters alone: 2 layers of 2 * 464


def test_a_server_with_little_room_writes_in_waves(llama):
    room = 4 * ALL + 2 * 16 * 64 * 4  # the weights and 2 rows
    small = ROUND._replace(memory=room, float32=1e18, bandwidth=1.0)
    plan = planned(settings(llama, generation={"name": "server"}), gpu=small)
    assert plan.server_rows == 2
    assert plan.seconds["generation"] == pytest.approx(4 * 6 * 4 * (BODY + HEAD) + 48 * 13 * 64 * 4)  # 8 rows, 4 waves
    none = planned(settings(llama, generation={"name": "server"}), gpu=ROUND._replace(memory=1.0))
    assert none.step_seconds == float("inf")


@pytest.mark.parametrize("name", GPUS)
def test_data_sheets_are_plausible(name):
    gpu = GPUS[name]
    assert 1e9 < gpu.link < gpu.bandwidth < gpu.float32 < gpu.bf16 < 1e16
    assert 1e10 < gpu.memory < 1e12
    assert gpu.source.startswith("https://")
