"""A short text of our own that the tokenizers of made checkpoints are trained on.

It is no corpus: it only has to give a byte-level BPE some whole words, code, numbers, accents and
more than one script.
"""

TEXT = """\
A language model reads a prompt once and then writes one token at a time. Reading the prompt is
called prefill, writing is called decode. Prefill is limited by arithmetic, decode is limited by
memory, and a server has to do both at once without making anybody wait too long.

The scheduler decides what happens in the next step. It looks at the requests that are waiting, at
the requests that are running, and at the memory that is free. When there is room it admits a new
request, and when there is none it takes memory back from the request that has written the most.
That request is not lost: it will be computed again, and it will write the same tokens as before.

Every request keeps its keys and values in blocks of one hundred and twenty-eight tokens. A table
says which block holds which part of the request. When the request ends, its blocks are free again,
and the next request may use them. Nothing is copied, nothing is moved, and nobody has to wait.

A simulator does the same without a model. It asks a formula how long each step would take, and
then it moves its own clock forward. If the formula is good, the simulator and the server make the
same decisions in the same order; if it is not, the difference tells us where to look.

What is the weather like today? It is raining, but the sun may come out later in the afternoon.
Where does the train to the city leave from? From platform four, at a quarter past nine.
How many apples are in the basket? There were twelve, and then three people took one each.
Could you write a short letter to my neighbour? Dear neighbour, thank you for watering the plants.

def add(first, second):
    # Returns the sum of two numbers.
    return first + second

for index in range(10):
    print(index, add(index, 1))

if __name__ == "__main__":
    values = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    total = sum(value * value for value in values)
    print("total:", total)

{"name": "example", "size": 1024, "values": [0.5, 1.25, -3.75], "is_ready": true, "next": null}

The café was closed, so we went to the crêperie across the street. Die Straße war naß und der
Himmel grau, aber später schien die Sonne. El niño comió una piña en la montaña. På fredag kommer
våra vänner från Åbo. Příliš žluťoučký kůň úpěl ďábelské ódy.
Москва стоит на реке. Река течёт медленно, и город отражается в воде.
今天天气很好，我们去公园散步。你好，世界。機械学習は面白いです。
The price is 3.50 €, or about 4 $ at 1.15; the ratio is 12/7 and the error is below 10^-6.
"""
