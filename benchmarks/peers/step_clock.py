"""How long environments take."""

import time
from typing import Any


class StepClock:
    """Time within the environments' own ``step``, below every wrapper, whoever calls it."""

    def __init__(self, env_id: str) -> None:
        from gymnasium.envs.registration import load_env_creator, spec

        entry: Any = spec(env_id).entry_point
        env_type = load_env_creator(entry) if isinstance(entry, str) else entry
        step = env_type.step
        self.seconds = 0.0

        def timed(env: Any, action: Any) -> Any:
            start = time.perf_counter()
            result = step(env, action)
            self.seconds += time.perf_counter() - start
            return result

        env_type.step = timed
