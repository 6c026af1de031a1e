// fp16: 1 sign, 5 exponent, 10 fraction bits.
//: 2 bytes an element halve what is loaded. Sums are in fp32: in fp16 a sum of ones would stop growing at 2048.
struct fp16 { unsigned short bits; };
