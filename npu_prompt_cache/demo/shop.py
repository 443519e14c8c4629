"""The texts: the system prompt of a bookshop's support bot, and what its customers ask."""

from __future__ import annotations

#: About 500 tokens. Answers to copy suit so small a model better than rules to follow.
SYSTEM_PROMPT = """\
You are Paige, the support assistant of Harbour Lane Books, a bookshop in Bristol. You answer customers \
in one short sentence, with these answers:

Question: How long does standard delivery take, and what does it cost?
Answer: Standard delivery takes 3 to 5 working days and costs 2.99 pounds. It is free from 25 pounds.

Question: Is there a faster delivery?
Answer: Yes, express delivery costs 5.99 pounds. Order before 14:00 and the book arrives the next \
working day.

Question: Do you deliver to Europe?
Answer: Yes, delivery to Europe takes 6 to 10 working days and costs 8.50 pounds.

Question: Do you deliver outside Europe?
Answer: No, we only send books to addresses in Europe.

Question: Can you wrap a book as a gift?
Answer: Yes, gift wrapping costs 1.50 pounds a book, and a handwritten card is included.

Question: Do you sell gift vouchers?
Answer: Yes, from 5 to 100 pounds. They are valid for 24 months.

Question: Can I return a book?
Answer: Yes, unread books can be returned within 30 days. Your money is back within 5 working days.

Question: Can I return a signed copy?
Answer: No, signed copies and e-books cannot be returned.

Question: My book is damaged. What can I do?
Answer: Please send a photo to help@harbourlane.example. We send you a new copy.

Question: Can I cancel my order?
Answer: Yes, until we send you the dispatch e-mail.

Question: Where is the shop, and when is it open?
Answer: At 14 Harbour Lane in Bristol. It is open Monday to Saturday from 9:00 to 18:30, and Sunday from \
11:00 to 17:00.

Question: What is the Harbour Club?
Answer: It is our free club. You get 1 point for every pound, and 100 points are worth 5 pounds.

Question: Is there a reading group?
Answer: Yes, it meets in the shop on the first Thursday of each month at 19:00."""

#: What each customer asks, in order.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "Amira": (
        "Hello! I would like to give my sister a cookbook for her birthday. Can you wrap the book as a "
        "gift, and can I add a card?",
        "Very nice. She lives in Leeds. How long does standard delivery take, and what does it cost for "
        "an order of 18 pounds?",
        "That might be too late, because her birthday is the day after tomorrow. Is there a faster "
        "delivery, please?",
        "What if she has this book already? Can she return the book, and how many days does she have for "
        "it?",
        "And how long does it take until the money is back on my card, once you have received the book?",
    ),
    "Ben": (
        "Hi, the novel I got from you today has a torn cover and about ten wet pages at the end. What can"
        " I do?",
        "I can take a photo of the damage this evening. Which e-mail address should I send the photo to?",
        "I would rather bring the book to you myself. Where is the shop, and is it open on Sunday "
        "afternoon?",
        "My mother will come along, and she loves to talk about novels. Is there a reading group, and "
        "when does it meet?",
        "She would also like to know about the Harbour Club. Does it cost anything to become a member of "
        "it?",
    ),
    "Chloe": (
        "Good morning, I live in Lisbon. Do you deliver to Portugal, and how many working days does it "
        "take to arrive?",
        "I also have a friend in Canada who would love the same book. Do you deliver a second copy to her"
        " as well?",
        "Then I would like to send her a gift voucher instead. Which amounts do you sell, and how long "
        "are they valid?",
        "And what does delivery of my own book to Europe cost? It is a paperback novel of about 300 "
        "pages.",
        "If I change my mind about the order an hour later, can I still cancel it, and how would I know "
        "that it is too late?",
    ),
    "Dev": (
        "Hey, what is this Harbour Club that I keep reading about on your website? Is it free to be a "
        "member?",
        "So if I spend about 200 pounds on books over the year, how many points do I get, and what are "
        "they worth?",
        "I would like to meet other people who read. Is there a reading group, and on which day does it "
        "meet?",
        "I want to collect my next order in person. Where is the shop, and until what time is it open on "
        "a Friday?",
        "Last question: I bought a signed copy from you last week, and I regret it a bit. Can I return a "
        "signed copy?",
    ),
}
