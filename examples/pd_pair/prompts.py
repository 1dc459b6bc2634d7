"""The prompts of the examples: one harbour notice, and questions about it.

The notice comes first, so the second prompt begins with the same few hundred
tokens as the first one: whoever still holds those need not fetch them again.
"""

from __future__ import annotations

__all__ = ("CROWD", "NOTICE", "QUESTIONS")

NOTICE = """\
You answer questions about the following harbour notice. Use only what it says.

Notice to passengers and hauliers, winter timetable. From the first Monday in \
November the small ferry crosses the sound eight times a day, at seven, nine and \
eleven in the morning, at noon, and then every two hours until eight in the \
evening. The large ferry sails at half past six in the morning and at five in the \
afternoon only, and takes lorries of up to forty tonnes. Foot passengers board by \
the north gangway and need not book. Cyclists board with the cars, before the \
lorries, and pay nothing for the bicycle. Cars must be at the slip twenty minutes \
before departure; lorries must be there forty minutes before, so that the mate can \
plan how the weight is spread over the deck. The crossing takes thirty five \
minutes in fair weather and up to an hour when the wind is from the west. When \
gusts exceed fifty knots the small ferry stays in port, and its passengers are \
carried by the large one, as far as there is room. Nobody is left behind at \
night: if the last crossing is cancelled, the harbour office opens the waiting \
hall, lights the stove, and gives out blankets, soup and bread. Tickets that were \
bought for a cancelled crossing stay valid for a year, and are refunded at the \
office on request, in cash, against the stub. Dogs travel free on a lead. Fuel \
cans, fireworks and gas bottles over five kilograms are refused at the gate. The \
café on the upper deck of the large ferry serves breakfast until nine, and after \
that only coffee and cake."""

QUESTIONS: dict[str, str] = {
    "req-1": (
        "I drive a lorry and want to cross in the afternoon. Which ferry do I take, "
        "when do I have to be at the slip, and why so early?"
    ),
    "req-2": (
        "What happens to me and to my ticket if the wind is so strong tonight that "
        "the last crossing is cancelled? Please explain it step by step."
    ),
}

CROWD: dict[str, str] = {
    **QUESTIONS,
    "req-3": "Do I have to book if I come on foot, and where do I go on board?",
    "req-4": "May I take my dog and a full fuel can with me? Answer in two sentences.",
    "req-5": "It is half past nine. Can I still get breakfast on board?",
}
"""Questions of several people who ask at once."""
