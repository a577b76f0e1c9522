"""The training step of ``text_speed.py`` by TRL with transformers' generate: seconds and memory.

cuDNN's attention is off, which is TRL's faster setting: cuDNN plans anew for each length of a text.
"""

import os
import tempfile
import time
from typing import Any

import torch
from shared import DEVICE, case, gib, language_config, language_model, peak_bytes, prompt_texts, wait, word_tokenizer
from text_speed import GROUP, NEW, PROMPT, PROMPTS, STEPS, WARM_UP, reward

ROWS = min(16, PROMPTS * GROUP)


def main() -> None:
    with case(f"TRL, {ROWS} rows") as found:
        import trl
        from datasets import Dataset
        from transformers import TrainerCallback

        torch.backends.cuda.enable_cudnn_sdp(False)
        size, steps, clock = language_config().vocab_size, [], {"begin": 0.0, "generate": 0.0}

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                wait()
                clock.update(begin=time.perf_counter(), generate=0.0)

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                wait()
                taken = time.perf_counter() - clock["begin"]
                steps.append((clock["generate"], taken - clock["generate"]))
                control.should_training_stop = len(steps) >= WARM_UP + STEPS
                return control

        args = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=PROMPTS * GROUP // ROWS,
            num_generations=GROUP,
            max_completion_length=NEW,
            generation_kwargs={"min_new_tokens": NEW},
            loss_type="dapo",
            learning_rate=1e-6,
            max_grad_norm=1.0,
            max_steps=1_000_000,
            bf16=DEVICE == "cuda",
            gradient_checkpointing=False,
            use_cpu=DEVICE == "cpu",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
        )
        trainer = trl.GRPOTrainer(
            model=language_model(),
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompt_texts(PROMPTS * (WARM_UP + STEPS + 1), PROMPT, size)}),
            processing_class=word_tokenizer(size),
            callbacks=[Clock()],
        )
        inner = trainer._generate_single_turn

        def timed(*args: Any, **kwargs: Any) -> Any:
            wait()
            begin = time.perf_counter()
            answer = inner(*args, **kwargs)
            wait()
            clock["generate"] += time.perf_counter() - begin
            return answer

        trainer._generate_single_turn = timed
        trainer.train()
        generate, update = min(steps[WARM_UP:], key=sum)
        found |= {
            "step_s": round(generate + update, 3),
            "generate_s": round(generate, 3),
            "update_s": round(update, 3),
            "first_s": round(sum(steps[0]), 2),
            "peak_gib": gib(peak_bytes()),
            "trl": trl.__version__,
        }


if __name__ == "__main__":
    os.environ.setdefault("WANDB_DISABLED", "true")
    main()
