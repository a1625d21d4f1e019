// The 16-bit storage types, and their conversion one element at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace hf_paged {

struct BFloat16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }
// Moving the exponent by a multiplication also normalises subnormals: 2^112 = 2^(127 - 15).
inline float to_float(Half x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
    const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // inf and NaN keep the largest exponent
    const float scaled = float_of_bits(magnitude) * float_of_bits((112u + 127u) << 23);
    return float_of_bits(sign | special | bits_of_float(scaled));
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, BFloat16& out) {
    const uint32_t bits = bits_of_float(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
inline void from_float(float x, Half& out) {
    const uint32_t bits = bits_of_float(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
        half = 0x7c00u;  // rounds to infinity
    } else if (magnitude < 0x38800000u) {
        // Subnormal: adding 0.5 leaves the value in the low mantissa bits, rounded by the adder.
        half = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    } else {
        half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    }
    out.bits = static_cast<uint16_t>(sign | half);
}

}  // namespace hf_paged
