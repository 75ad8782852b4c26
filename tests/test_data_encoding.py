"""Chat templates, special tokens, lengths, and what a reward gets to read."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_toolbox.data import decode_completion, encode_prompts, encode_texts
from grpo_toolbox.errors import ConfigError, DataError

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n\n</think>\n\n{% endif %}"
)


def make_tokenizer(
    chat_template: str | None = TEMPLATE, *, after: str = "<bos> $A", pad: str = "<pad>", eos: str = "<eos>"
) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, so lengths can be counted by hand."""
    specials = ["<pad>", "<bos>", "<eos>"]
    vocab = {token: index for index, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(
        single=after, special_tokens=[(token, vocab[token]) for token in specials]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token=eos, pad_token=pad)
    tokenizer.chat_template = chat_template
    return tokenizer


def decoded(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def one(prompt: Any, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> tuple[int, ...]:
    return encode_prompts([{"prompt": prompt}], tokenizer, **settings)[0].ids


USER = [{"role": "user", "content": "hi"}]


def test_template_and_tokenizer_together_give_one_bos() -> None:
    tokenizer = make_tokenizer()
    ids = one(USER, tokenizer)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]


def test_plain_text_gets_one_bos_and_no_eos() -> None:
    for after in ("<bos> $A", "<bos> $A <eos>"):
        tokenizer = make_tokenizer(after=after)
        assert decoded(one("hi", tokenizer), tokenizer) == "<bos>hi"
        assert decoded(one("<bos>hi", tokenizer), tokenizer) == "<bos>hi"


def test_template_without_bos_gets_the_one_that_the_tokenizer_adds() -> None:
    tokenizer = make_tokenizer("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert decoded(one(USER, tokenizer), tokenizer) == "<bos>hi"


@pytest.mark.parametrize("after", ["$A", "$A <eos>"])
def test_a_tokenizer_that_adds_no_bos_gets_none(after: str) -> None:
    tokenizer = make_tokenizer(after=after)
    assert decoded(one("hi", tokenizer), tokenizer) == "hi"


def test_every_text_of_a_batch_gets_its_bos() -> None:
    tokenizer = make_tokenizer()
    texts = ["a", "<bos>b", "cc"]
    assert [decoded(ids, tokenizer) for ids in encode_texts(texts, tokenizer)] == ["<bos>a", "<bos>b", "<bos>cc"]


def test_what_the_template_puts_before_the_answer_is_kept_byte_for_byte() -> None:
    tokenizer = make_tokenizer()
    assert decoded(one(USER, tokenizer), tokenizer) == "<bos><user>hi<end><assistant><think>\n\n</think>\n\n"


def test_message_ids_are_those_of_apply_chat_template() -> None:
    tokenizer = make_tokenizer()
    expected = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert one(USER, tokenizer) == tuple(expected)


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    tokenizer = make_tokenizer()
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    assert decoded(one(messages, tokenizer), tokenizer) == "<bos><user>hi<end><assistant>The answer is"


def test_text_stays_plain_unless_chat() -> None:
    tokenizer = make_tokenizer()
    rows = [{"prompt": "hi", "answer": "1", "level": 2}]
    plain = encode_prompts(rows, tokenizer)[0]
    assert (plain.text, plain.conversational, dict(plain.columns)) == ("hi", False, {"answer": "1", "level": 2})
    chat = encode_prompts(rows, tokenizer, chat=True)[0]
    assert (chat.text, chat.conversational) == (USER, True)
    assert chat.ids == one(USER, tokenizer)


def test_system_prompt_leads_the_conversation_unless_it_has_one() -> None:
    tokenizer = make_tokenizer()
    ids = one("hi", tokenizer, chat=True, system_prompt="Be brief.")
    assert decoded(ids, tokenizer).startswith("<bos><system>Be brief.<end><user>hi<end>")
    own = [{"role": "system", "content": "Be long."}, *USER]
    assert "Be brief." not in decoded(one(own, tokenizer, system_prompt="Be brief."), tokenizer)


def test_system_prompt_has_no_place_in_plain_text() -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt is set.*data\.chat=true"):
        one("hi", make_tokenizer(), system_prompt="Be brief.")


def test_messages_need_a_chat_template() -> None:
    for settings in ({"prompt": USER}, {"prompt": "hi", "chat": True}):
        with pytest.raises(ConfigError, match="has no chat template"):
            one(settings.pop("prompt"), make_tokenizer(None), **settings)


def test_a_template_that_refuses_names_the_row() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    rows = [{"prompt": USER}, {"prompt": [{"role": "system", "content": "s"}, *USER]}]
    with pytest.raises(DataError, match="row 2: the chat template of the model refuses the messages: no system role"):
        encode_prompts(rows, make_tokenizer(template))


def test_settings_that_the_template_does_not_read_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {"enable_thinking": False}
    one(USER, make_tokenizer(), chat_template_kwargs=kwargs)
    one("hi", make_tokenizer(), chat_template_kwargs=kwargs)
    assert caplog.text.count("data.chat_template_kwargs.enable_thinking changes nothing") == 2


def test_settings_that_the_template_reads_change_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer(TEMPLATE + "{% if enable_thinking is false %}!{% endif %}")
    assert decoded(one(USER, tokenizer, chat_template_kwargs={"enable_thinking": False}), tokenizer).endswith("!")
    assert caplog.text == ""


def test_too_long_prompts_are_an_error_or_dropped_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()  # one token a byte and BOS: 600 tokens
    rows = [{"prompt": "short"}, {"prompt": "x" * 599}, {"prompt": "y" * 511}]
    with pytest.raises(DataError, match=r"1 of 3 prompts.*row 2 with 600 tokens, allowed are 512.*data\.on_long=drop"):
        encode_prompts(rows, tokenizer, max_prompt_tokens=512)
    kept = encode_prompts(rows, tokenizer, max_prompt_tokens=512, on_long="drop")
    assert [prompt.id for prompt in kept] == [0, 2]  # the id stays the index of the row
    assert [len(prompt.ids) for prompt in kept] == [6, 512]
    assert "dropped 1 of 3 prompts longer than 512 tokens" in caplog.text


def test_length_is_of_what_is_sent_tools_included() -> None:
    tokenizer = make_tokenizer()
    tools = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {}}}]
    length = len(one(USER, tokenizer))
    assert len(one(USER, tokenizer, tools=tools)) == length + len("[calculator]")
    assert one(USER, tokenizer, max_prompt_tokens=length)
    with pytest.raises(DataError, match="too long"):
        one(USER, tokenizer, tools=tools, max_prompt_tokens=length)


def test_all_prompts_too_long_is_an_empty_data_set() -> None:
    rows = [{"prompt": "xxx"}, {"prompt": "yyyy"}]
    with pytest.raises(DataError, match="empty after filtering"):
        encode_prompts(rows, make_tokenizer(), max_prompt_tokens=2, on_long="drop")


def test_prompt_and_completion_fit_into_the_positions_of_the_model() -> None:
    tokenizer = make_tokenizer()  # "xxx" is 4 tokens
    assert one("xxx", tokenizer, max_positions=10, max_new_tokens=6)
    with pytest.raises(DataError, match=r"4 tokens, allowed are 3 \(10 positions.*rollout\.max_new_tokens=7\)"):
        one("xxx", tokenizer, max_positions=10, max_new_tokens=7)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=10 leaves no room for a prompt"):
        one("xxx", tokenizer, max_positions=10, max_new_tokens=10)


def test_on_long_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"data\.on_long='truncate' is not an option: drop, error"):
        one("xxx", make_tokenizer(), on_long="truncate")


def test_a_prompt_of_unknown_characters_only_is_an_error() -> None:
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    with pytest.raises(DataError, match="row 2: the prompt 'xyz' has no token"):
        encode_prompts([{"prompt": "ab"}, {"prompt": "xyz"}], PreTrainedTokenizerFast(tokenizer_object=core))


def test_duplicate_prompts_have_their_own_ids() -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}]
    first, second = encode_prompts(rows, make_tokenizer())
    assert (first.id, second.id) == (0, 1)
    assert first.ids == second.ids
    assert (first.columns["answer"], second.columns["answer"]) == ("1", "2")


def test_added_special_tokens_stay_visible_to_rewards() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = tokenizer("<answer>5</answer><eos>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 4
    assert decode_completion(ids, tokenizer, "stop") == "<answer>5</answer>"


def test_a_completion_that_did_not_end_loses_no_token() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("512", add_special_tokens=False)["input_ids"]
    assert decode_completion(ids, tokenizer, "length") == "512"
    assert decode_completion([*ids, tokenizer.eos_token_id], tokenizer, "stop") == "512"


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_padding_is_no_text(pad: str) -> None:
    tokenizer = make_tokenizer(pad=pad)
    ids = tokenizer("5", add_special_tokens=False)["input_ids"]
    padded = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.pad_token_id]
    text = decode_completion(padded, tokenizer, "stop")
    assert text == ("5<eos>" if pad == "<pad>" else "5")


def test_nothing_is_tidied_up_when_decoding() -> None:
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer("a , b .\n do n't", add_special_tokens=False)["input_ids"]
    assert decode_completion(ids, tokenizer, "length") == "a , b .\n do n't"


def test_a_prompt_that_the_tokenizer_cannot_write_is_refused() -> None:
    from grpo_toolbox.models.tiny import build_tokenizer

    with pytest.raises(DataError, match=r"row 2: the prompt '3\+é=' has characters"):
        encode_prompts([{"prompt": "3+4="}, {"prompt": "3+é="}], build_tokenizer())
