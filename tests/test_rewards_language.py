"""language_consistency: the share of a text that is in one language."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.rewards.language import LANGUAGES, SCRIPTS, language_share, script_of

TEXTS = {
    "en": "First we look at how many pens there are. She has four boxes, and each of them holds six pens.",
    "de": "Zuerst zählen wir die Stifte. Sie hat vier Schachteln, und in jeder sind sechs Stifte, also nicht mehr.",
    "fr": "On compte d'abord les stylos. Elle a quatre boîtes, et dans chaque boîte il y a six stylos pour les élèves.",
    "es": "Primero contamos los lápices. Ella tiene cuatro cajas y en cada una hay seis lápices para los niños.",
    "it": "Prima contiamo le penne. Lei ha quattro scatole e in ogni scatola ci sono sei penne, quindi non di più.",
    "pt": "Primeiro contamos as canetas. Ela tem quatro caixas e em cada uma há seis canetas, mas não mais.",
    "nl": "Eerst tellen we de pennen. Zij heeft vier dozen en er zitten zes pennen in, dus dat is niet meer.",
    "ru": "Сначала посчитаем ручки. У неё четыре коробки, и в каждой по шесть ручек, так что это не всё.",
    "uk": "Спочатку порахуємо ручки. У неї чотири коробки, і в кожній по шість ручок, але це ще не все, якщо є інші.",
    "el": "Πρώτα μετράμε τα στυλό. Έχει τέσσερα κουτιά και το καθένα έχει έξι στυλό.",
    "he": "קודם נספור את העטים. יש לה ארבע קופסאות ובכל אחת שישה עטים.",
    "ar": "أولا نعد الأقلام. لديها أربعة صناديق وفي كل صندوق ستة أقلام.",
    "hi": "पहले हम कलम गिनते हैं। उसके पास चार डिब्बे हैं और हर डिब्बे में छह कलम हैं।",
    "bn": "প্রথমে আমরা কলম গুনি। তার চারটি বাক্স আছে এবং প্রতিটিতে ছয়টি কলম আছে।",
    "th": "ก่อนอื่นเรานับปากกา เธอมีกล่องสี่ใบ และแต่ละใบมีปากกาหกด้าม",
    "ko": "먼저 펜을 셉니다. 그녀는 상자가 네 개 있고 각 상자에는 펜이 여섯 개 있습니다.",
    "zh": "首先我们数一数钢笔。她有四个盒子，每个盒子里有六支钢笔。",
    "ja": "まずペンを数えます。彼女は箱を四つ持っていて、それぞれに六本のペンが入っています。",
}


MORE = {
    "en": "He also had no more than the plus sign, so he would come in by the door to the main hall, per day.",
    "de": "Was er in der Stadt so war, das man am Ende im Haus an alle verteilt, hat uns nicht zum Ziel geführt.",
    "fr": "Tu as de la chance : en un mot, on te donne le plus, si ma réponse est juste et ne se discute pas.",
    "es": "En la mesa de la casa no hay más de un lápiz; si se me pide, le doy uno con este color, o sin él.",
    "it": "In un giorno si ha da fare tutto, e su questo non ci sono dubbi: le penne al tavolo sono come le altre.",
    "pt": "No fim de semana ela me deu uma parte de tudo, e por isso não se sabe mais como ele te ajudou.",
    "nl": "Als we in de stad zijn of door het park gaan, was die per dag niet te zien, maar me dunkt alle dagen wel.",
}


@pytest.mark.parametrize("written", MORE)
def test_words_that_several_languages_have_are_not_charged(written: str) -> None:
    assert language_share(MORE[written], written) >= 0.95
    assert max(language_share(MORE[written], other) or 0 for other in MORE if other != written) <= 0.5


def test_there_is_a_text_for_every_language() -> None:
    assert set(TEXTS) == set(LANGUAGES)


@pytest.mark.parametrize("written", TEXTS)
def test_a_text_is_in_its_own_language_and_in_no_other(written: str) -> None:
    assert language_share(TEXTS[written], written) >= 0.95
    for other in LANGUAGES:
        if other != written:
            share = language_share(TEXTS[written], other)
            assert share is not None
            assert share <= (0.35 if (written, other) == ("ja", "zh") else 0.2), other  # Chinese characters in Japanese


def test_a_mixture_counts_by_letters() -> None:
    # "the answer is" has 11 letters, 答案是五 four: 11/15 and 4/15
    reward = build_reward("language_consistency")
    assert reward(completions=["The answer is 答案是五"]) == pytest.approx([11 / 15])
    assert build_reward("language_consistency", language="zh")(completions=["The answer is 答案是五"]) == pytest.approx(
        [4 / 15]
    )


def test_words_of_another_language_in_the_same_script_count_against_it() -> None:
    # own: the, the, this; German's: ist, nicht. "of" is Dutch, too, and "so" German: they say nothing
    assert language_share("So the sum of the two ist nicht this", "en") == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    "text",
    [
        r"所以 $\frac{a}{b} = \text{const}$，答案是 \boxed{abc}",
        r"所以 \(x + yz\) 等于 \[ \sum_{abc} \alpha \]",
        "代码是\n```python\nprint('hello world')\n```\n",
        "用 `len(values)` 计算",
        "<think>我们来算</think><answer>五</answer>",
        "见 https://example.com/some/page 的说明",
        "设 x 和 y 是整数，π 是常数",
        "还没有结束的代码\n```python\nprint('hello",
    ],
)
def test_code_formulas_tags_addresses_and_variables_are_of_no_language(text: str) -> None:
    assert language_share(text, "zh") == 1.0


@pytest.mark.parametrize("text", ["", "42", "$x = 5$", "x = 5", "```\ncode\n```", "!?", "\\boxed{5}<|im_end|>"])
def test_a_text_without_words_has_no_score(text: str) -> None:
    assert build_reward("language_consistency")(completions=[text]) == [None]


def test_thinking_and_answer_can_be_read_alone() -> None:
    text = f"<think>{TEXTS['zh']}</think>{TEXTS['en']}"
    shares = {
        part: build_reward("language_consistency", part=part)(completions=[text])[0] for part in ("thinking", "answer")
    }
    assert shares == {"thinking": 0.0, "answer": 1.0}
    cut_off = f"<think>{TEXTS['zh']}"
    assert build_reward("language_consistency", part="thinking", language="zh")(completions=[cut_off]) == [1.0]
    assert build_reward("language_consistency", part="answer")(completions=[cut_off]) == [None]


def test_each_row_may_have_its_own_language() -> None:
    reward = build_reward("language_consistency", column="lang")
    assert reward.columns_needed() == ("lang",)
    scores = reward(completions=[TEXTS["zh"], TEXTS["zh"], TEXTS["zh"]], lang=["zh", "en", None])
    assert scores == [1.0, 0.0, None]
    reward.check_rows([{"prompt": "p", "lang": "zh"}, {"prompt": "p", "lang": None}])
    with pytest.raises(DataError, match="'klingon' in column 'lang'"):
        reward.check_rows([{"prompt": "p", "lang": "klingon"}])


def test_scripts_do_not_overlap_and_letters_are_found_in_theirs() -> None:
    ranges = sorted(one for several in SCRIPTS.values() for one in several)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(ranges))
    letters = {"a": "latin", "ß": "latin", "ω": "greek", "Ж": "cyrillic", "漢": "han", "の": "kana", "글": "hangul"}
    letters |= {"א": "hebrew", "ب": "arabic", "ก": "thai", "अ": "devanagari", "ა": "other", "1": "other"}
    assert {letter: script_of(letter) for letter in letters} == letters


@settings(deadline=None)
@given(st.text(max_size=60), st.sampled_from(sorted(LANGUAGES)))
def test_any_text_has_a_share_between_0_and_1_or_none(text: str, language: str) -> None:
    share = language_share(text, language)
    assert share is None or 0.0 <= share <= 1.0


@pytest.mark.parametrize(("key", "value"), [("language", "english"), ("language", None), ("part", "thoughts")])
def test_options_that_cannot_work_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.{key}"):
        build_reward("language_consistency", **{key: value})
