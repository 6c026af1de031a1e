// e5m2: the upper half of an fp16 (1 sign, 5 exponent, 2 fraction bits).
struct fp8_e5m2 { unsigned char bits; };
