"""The texts: the system prompt of a bookshop's support bot, and what its customers ask."""

from __future__ import annotations

#: About 500 tokens. Answers to copy suit so small a model better than rules to follow.
SYSTEM_PROMPT = """\
You are Paige, the support assistant of Harbour Lane Books, a bookshop in Bristol. You answer customers in one short \
sentence, with these answers:

Question: How long does standard delivery take, and what does it cost?
Answer: Standard delivery takes 3 to 5 working days and costs 2.99 pounds. It is free from 25 pounds.

Question: Is there a faster delivery?
Answer: Yes, express delivery costs 5.99 pounds. Order before 14:00 and the book arrives the next working day.

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
Answer: At 14 Harbour Lane in Bristol. It is open Monday to Saturday from 9:00 to 18:30, and Sunday from 11:00 to \
17:00.

Question: What is the Harbour Club?
Answer: It is our free club. You get 1 point for every pound, and 100 points are worth 5 pounds.

Question: Is there a reading group?
Answer: Yes, it meets in the shop on the first Thursday of each month at 19:00."""

#: What each customer asks, in order.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "Amira": (
        "Do you offer gift wrapping for a book, and can I add a handwritten card to it?",
        "How long does standard delivery to Leeds take, and what does it cost for an order of 18 pounds?",
        "Is there a faster delivery, and until what time do I have to order for that?",
        "Do you sell gift vouchers, and for how many months are they valid?",
        "Where is the shop in Bristol, and when is it open on Saturday and Sunday?",
    ),
    "Ben": (
        "What is the address of the shop in Bristol, and when are you open on Sunday?",
        "Is there a reading group in the shop, and on which day and at what time does it meet?",
        "What is the Harbour Club, and what are 100 points worth when I am a member?",
        "Can I return a book that I have not read, and how many days do I have for it?",
        "Can I cancel an order that I made on your website an hour ago, and until when?",
    ),
    "Chloe": (
        "How many working days does delivery to Europe take, and what does it cost? I live in Lisbon.",
        "Do you sell gift vouchers, which amounts can I choose, and how long are they valid?",
        "Can you wrap a book as a gift for my daughter, and what does the gift wrapping cost?",
        "Can I return a signed copy of a novel that I bought from you last week?",
        "Is there a reading group, and when does it meet? I will be in Bristol in May.",
    ),
    "Dev": (
        "How long does standard delivery take, what does it cost, and from what amount is it free?",
        "What is the Harbour Club, does it cost anything, and how do I get points there?",
        "Is there a faster delivery than the standard one, and what does it cost?",
        "My book is damaged, its cover is torn. To which e-mail address do I send a photo?",
        "Until what time is the shop open on Friday, and what is its address?",
    ),
}
