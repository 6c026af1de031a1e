// bf16: the upper half of an fp32 (1 sign, 8 exponent, 7 fraction bits).
struct bf16 { unsigned short bits; };
