// fp16: 1 sign, 5 exponent, 10 fraction bits.
struct fp16 { unsigned short bits; };
