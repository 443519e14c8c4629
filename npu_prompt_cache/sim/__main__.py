"""``python -m npu_prompt_cache.sim``."""

import sys

from npu_prompt_cache.sim.command import main

sys.exit(main())
