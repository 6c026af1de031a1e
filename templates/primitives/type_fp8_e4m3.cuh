// e4m3: 1 sign, 4 exponent, 3 fraction bits; up to 448, without infinity.
//: An element is a byte: half of what 16 bits load, for 4 significant bits. A scale keeps values in its range.
struct fp8_e4m3 { unsigned char bits; };
