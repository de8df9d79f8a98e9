"""int8 keys and values: the specification of the values that are stored.

A stored integer B, -127 .. 127, stands for (B + offset) * scale (the antiquant parameters of Huawei's
IncreFlashAttention operator), with scale and offset per token and kv head (made from that token alone), or per channel
(from a file, one a layer and kv head and element), keys and values each with their own.

Per token, in float32, each operation rounded by itself, over the head's elements x:
    low, high = min x, max x;  middle = (low + high) / 2;  half = (high - low) / 2
    scale = half / 127, offset = middle / scale, B = round((x - middle) * (127 / half)), ties to even
    where half < 2^-100: B = 0, and scale = |middle|, offset = +-1 by its sign (0, 0 for middle = 0)
    where anything is not finite, or half or |middle| is 2^100 or more: scale NaN, offset 0, B = 0
Per channel: B = round(x / scale - offset) clamped to -127 .. 127, 0 where that is NaN... the row is then spoilt by a
NaN only if its scale says so; a checkpoint's scales are finite and above zero.
"""
