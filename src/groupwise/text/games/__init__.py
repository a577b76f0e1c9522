"""Public text games as text environments, by names such as ``textarena:2048-v0``. Their packages are imported when one is made."""
