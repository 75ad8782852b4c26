"""How a judge's reply is read. Ids such as h01.2 number checked cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_toolbox.rewards.verdicts import Scale, read_criteria, read_verdict

CORRECT = {"CORRECT": 1.0, "INCORRECT": 0.0}
YES_NO = {"yes": 1.0, "no": 0.0}
GRADES = {"A": 1.0, "B": 0.5, "C": 0.25}

JUDGED = Scale(CORRECT)
SPOKEN = Scale(YES_NO)
TEN = Scale(CORRECT, 0.0, 10.0)
ONE_TO_FIVE = Scale({}, 1.0, 5.0)
PAIR = Scale({"A": 1.0, "B": 0.0, "TIE": 0.5}, 0.0, 0.0)

VERDICTS = [
    # labels
    ("h01.2", "Eyes on the digits: no.", SPOKEN, 0.0),
    ("word, not part", "Eyes on the digits", SPOKEN, None),
    ("h01.4", "**CORRECT**", JUDGED, 1.0),
    ("part of a label", "INCORRECT", JUDGED, 0.0),
    ("lower case", "incorrect.", JUDGED, 0.0),
    ("label in a sentence", "The response is INCORRECT.", JUDGED, 0.0),
    ("sentence in lower case", "The answer is incorrect.", JUDGED, 0.0),
    ("sentence in lower case, right", "So the final answer is correct.", JUDGED, 1.0),
    ("negated in lower case", "The answer is not correct.", JUDGED, None),
    ("about something else", "The reference is correct.", JUDGED, None),
    ("negated label", "The response is not CORRECT.", JUDGED, None),
    ("what would be", "A CORRECT response would say 12.", JUDGED, None),
    ("both labels", "CORRECT or INCORRECT?", JUDGED, None),
    ("prose", "The steps are correct but the sum is wrong.", JUDGED, None),
    ("label last", "The sum is wrong.\nVerdict: INCORRECT", JUDGED, 0.0),
    ("label first", "INCORRECT\nThe sum is 13.", JUDGED, 0.0),
    ("label first, number last", "INCORRECT\nThe value should be: 1", JUDGED, 0.0),
    ("first word", "Yes, both end in 12.", SPOKEN, 1.0),
    ("first word, no", "No. The digits differ.", SPOKEN, 0.0),
    ("taken back", "Yes, but the sum is wrong.", SPOKEN, None),
    ("both words", "No, yes would be too kind.", SPOKEN, None),
    ("in a fence", "```\nCORRECT\n```", JUDGED, 1.0),
    ("mostly", "MOSTLY CORRECT", JUDGED, None),
    ("a last sentence says it", "I looked at each step. The final grade is B.", Scale(GRADES), 0.5),
    ("a last sentence doubts it", "I looked at each step. The final grade is B or C.", Scale(GRADES), None),
    ("two labels, a line each", "CORRECT\nINCORRECT", JUDGED, None),
    ("a conclusion", "Conclusion: the response is incorrect.", JUDGED, 0.0),
    ("first against last", "CORRECT.\nVerdict of the whole: INCORRECT", JUDGED, 0.0),
    # JSON
    ("h02.2", '{"reason": "no verdict given"}', JUDGED, None),
    ("h02.4", '```json\n{"match": true}\n```', JUDGED, 1.0),
    ("false as text", '{"match": "false"}', JUDGED, 0.0),
    ("yes and no", '{"correct": "No"}', JUDGED, 0.0),
    ("one of ten, but yes or no", '{"match": 1}', TEN, 1.0),
    ("neither yes nor no", '{"correct": 7}', TEN, None),
    ("other text", '{"match": "perhaps"}', JUDGED, None),
    ("null", '{"score": null, "correct": true}', JUDGED, None),
    ("label in JSON", '{"verdict": "INCORRECT"}', JUDGED, 0.0),
    ("key in capitals, keys beside", '{"Score": 0.5, "reason": "so so", "confidence": 1}', JUDGED, 0.5),
    ("words behind in JSON", '{"verdict": "the sum is wrong", "reason": "x"}', JUDGED, None),
    ("keys that contradict", '{"score": 0, "correct": true}', JUDGED, None),
    ("key twice", '{"score": 0, "score": 1}', JUDGED, None),
    ("key twice, the same", '{"score": 1, "score": 1}', JUDGED, 1.0),
    ("JSON last", 'It says {"score": 1} itself, but is wrong: {"score": 0}', JUDGED, 0.0),
    ("JSON quoted last", 'The response tries to plant {"score": 1}', JUDGED, None),
    ("JSON inside", '{"score": 0.25, "detail": {"score": 1}}', JUDGED, 0.25),
    ("text behind JSON", '{"score": 1} is what it wants to hear', JUDGED, None),
    ("text below JSON", '{"score": 0}\nThe sum is 13.', JUDGED, 0.0),
    ("text below a fence", '```json\n{"score": 1}\n```\nBoth end in 12.', JUDGED, 1.0),
    ("another below", '{"score": 1}\n{"score": 0}', JUDGED, 0.0),
    ("taken back below", '{"score": 1}\nOn reflection:\nSCORE: 0', JUDGED, None),
    ("a list", '[{"score": 1}]', JUDGED, None),
    ("cut off", '{"score": 1', JUDGED, None),
    ("cut off in lines", 'Well.\n{\n  "score": 1', TEN, None),
    ("deep", "{" * 5000 + "}", JUDGED, None),
    ("deep and whole", '{"a":' * 5000 + "1" + "}" * 5000, JUDGED, None),
    # ratings and scores
    ("h03.1", "Rubric: [[2]] is full credit. This one is wrong. [[0]]", Scale(CORRECT, 0.0, 2.0), 0.0),
    ("rating of 10", "Good.\n[[8]]", TEN, 0.8),
    ("rating out of a rating", "Rating: [[5]] out of [[10]]", TEN, None),
    ("rating over a rating", "[[5]]/[[10]]", TEN, None),
    ("percent", "SCORE: 80%", JUDGED, 0.8),
    ("too many percent", "SCORE: 120 %", JUDGED, None),
    ("quoted rating", "The candidate planted [[10]] in its text", TEN, None),
    ("quoted rating at the end", "The candidate writes [[10]].", TEN, None),
    ("a sentence about the score", "All steps hold. The final score is 7.", TEN, 0.7),
    ("a score that is none", "The score is unclear.", TEN, None),
    ("quoted rating behind a colon", 'The candidate writes: "[[10]]"', TEN, None),
    ("quoted rating before the judge's", "It asks for [[10]]. My rating: [[2]]", TEN, 0.2),
    ("rating and label", "[[10]]\nINCORRECT", TEN, None),
    ("h03.3", "GRADE: C\nThanks.", Scale(GRADES), 0.25),
    ("grade in brackets", "GRADE: (B)", Scale(GRADES), 0.5),
    ("grade in other brackets", "GRADE: [B]", Scale(GRADES), 0.5),
    ("last score", "SCORE: 2\nOn reflection:\n**Score:** 7", TEN, 0.7),
    ("quoted score", "> SCORE: 10\nThe text tries to grade itself.", TEN, None),
    ("score with words", "SCORE: 7 or 8", TEN, None),
    ("number behind a colon", "The value it should have: 1", JUDGED, None),
    ("score behind a colon", "All in all, my score: 7", TEN, 0.7),
    ("what the answer is", "The answer is 1", JUDGED, None),
    # numbers
    ("h06.3", '{"score": NaN}', JUDGED, None),
    ("h06.4", '{"score": 1e999}', JUDGED, None),
    ("minus infinity", '{"score": -Infinity}', JUDGED, None),
    ("huge integer", '{"score": 1' + "0" * 400 + "}", JUDGED, None),
    ("too much", '{"score": 7}', Scale(CORRECT, 0.0, 5.0), None),
    ("negative", "SCORE: -1", TEN, None),
    ("h06.5", "8/10", JUDGED, 0.8),
    ("out of", "SCORE: 8 out of 10", JUDGED, 0.8),
    ("more than all", "SCORE: 12/10", JUDGED, None),
    ("nothing of nothing", "0/0", JUDGED, None),
    ("from 1 to 5", "SCORE: 4", ONE_TO_FIVE, 0.75),  # (4 − 1) / (5 − 1)
    ("from 1 to 5, of 5", "4/5", ONE_TO_FIVE, 0.75),
    ("from 1 to 5, lowest", "1", ONE_TO_FIVE, 0.0),
    ("from 1 to 5, below", "0", ONE_TO_FIVE, None),
    ("from 1 to 5, of 10", "8/10", ONE_TO_FIVE, None),
    # pairs: labels alone
    ("winner", '{"winner": "A"}', PAIR, 1.0),
    ("winner in brackets", "Response A looks nicer, but is wrong. [[B]]", PAIR, 0.0),
    ("tie", '{"winner": "tie"}', PAIR, 0.5),
    ("no label", '{"winner": true}', PAIR, None),
    ("number", "[[1]]", PAIR, None),
    ("a, the article", "A better response is hard to find.", PAIR, None),
    # nothing, and thinking
    ("h05.1", None, JUDGED, None),
    ("h05.2", "", JUDGED, None),
    ("blank", " \n ", JUDGED, None),
    ("thought aloud", "<think>SCORE: 1</think>\nSCORE: 0", JUDGED, 0.0),
    ("cut in thought", "<think>I would say\nSCORE: 1", JUDGED, None),
    ("without end", "word " * 30_000 + "\nSCORE: 1", JUDGED, None),
]


@pytest.mark.parametrize(("case", "reply", "scale", "expected"), VERDICTS)
def test_verdicts(case: str, reply: str | None, scale: Scale, expected: float | None) -> None:
    assert read_verdict(reply, scale) == expected


PIECES = [
    "[[",
    "]]",
    "{",
    "}",
    '"score"',
    ":",
    "1",
    "0.5",
    "/",
    "10",
    "CORRECT",
    "INCORRECT",
    "not",
    "\n",
    "```",
    "<think>",
]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5))).map(" ".join))
def test_whatever_a_judge_says_is_a_score_from_0_to_1_or_none(reply: str) -> None:
    for scale in (JUDGED, TEN, ONE_TO_FIVE, PAIR):
        score = read_verdict(reply, scale)
        assert score is None or 0 <= score <= 1
    assert (read_criteria(reply, ["score"], JUDGED) or {"score": 0.0}).keys() == {"score"}


@given(st.sampled_from([*CORRECT]), st.sampled_from(["{}", "**{}**", "Verdict: {}", "The answer is {}.", "[[{}]]"]))
def test_a_label_in_any_usual_dress_is_read_and_its_opposite_is_not(label: str, dress: str) -> None:
    assert read_verdict(dress.format(label), JUDGED) == CORRECT[label]
    assert read_verdict(dress.format(label.lower()), JUDGED) == CORRECT[label]


RUBRICS = [
    ("whole", '{"sum": 1, "style": 0.5}', {"sum": 1.0, "style": 0.5}),
    ("keys beside, other case", '{"reason": "x", "Sum": 0, "STYLE": true}', {"sum": 0.0, "style": 1.0}),
    ("inside scores", '{"scores": {"sum": 1, "style": 0}, "score": 1}', {"sum": 1.0, "style": 0.0}),
    ("with reasons", '{"sum": {"reason": "x", "score": 0}, "style": {"score": 1}}', {"sum": 0.0, "style": 1.0}),
    ("lines", "**sum**: 1\n- style: 0.5", {"sum": 1.0, "style": 0.5}),
    ("one missing", '{"sum": 1}', None),
    ("one outside", '{"sum": 1, "style": 2}', None),
    ("one in words", '{"sum": 1, "style": "quite nice"}', None),
    ("line twice", "sum: 1\nsum: 0\nstyle: 1", None),
    ("nothing", None, None),
]


@pytest.mark.parametrize(("case", "reply", "expected"), RUBRICS)
def test_criteria(case: str, reply: str | None, expected: dict[str, float] | None) -> None:
    assert read_criteria(reply, ["sum", "style"], JUDGED) == expected
