"""A conversation as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_prompt_cache.demo.errors import DemoError

END_OF_TURN = "<|im_end|>"


class Conversation:
    """One customer's conversation with the bot, in the ChatML form that SmolLM2 was trained on.

    It is kept as ids, and each prompt begins with the previous prompt and the very ids that the model
    generated. Rendering the whole chat anew would make ids of the answers' text again, which need not be the
    same ids.
    """

    def __init__(self, tokenizer: Any, system_prompt: str) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._end_of_turn: int = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        self._ids = self._encode(f"<|im_start|>system\n{system_prompt}{END_OF_TURN}")
        self._is_new = True

    def ask(self, question: str) -> list[int]:
        """The prompt for the customer's next question.

        Raises:
            DemoError: the first prompt is not what the tokenizer's own chat template gives.
        """
        if self._ids[-1] != self._end_of_turn:  # an answer that max_new_tokens cut
            self._ids.append(self._end_of_turn)
        self._ids += self._encode(f"\n<|im_start|>user\n{question}{END_OF_TURN}\n<|im_start|>assistant\n")
        if self._is_new:
            self._check_template(question)
            self._is_new = False
        return list(self._ids)

    def answer(self, generated: Sequence[int]) -> str:
        """Adds what the model generated for the last prompt; returns it as text."""
        self._ids += generated
        return str(self._tokenizer.decode(generated, skip_special_tokens=True)).strip()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _check_template(self, question: str) -> None:
        messages = [
            {"role": "system", "content": self._system_prompt},
            {"role": "user", "content": question},
        ]
        template = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        if list(template["input_ids"]) != self._ids:
            raise DemoError("the tokenizer's chat template is not the ChatML that this demo writes")
