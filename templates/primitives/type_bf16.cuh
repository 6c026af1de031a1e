// bf16: the upper half of an fp32 (1 sign, 8 exponent, 7 fraction bits).
//: 2 bytes an element halve what is loaded, with the range of fp32. Sums are in fp32: in bf16 a sum of ones would stop
//: growing at 256.
struct bf16 { unsigned short bits; };
