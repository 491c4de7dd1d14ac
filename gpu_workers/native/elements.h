/* Elements of every type as vectors of fp32: what the C files of this directory share.
 *
 * One source for every CPU: GCC's and clang's vector types become AVX-512, AVX2 or whatever the
 * compiler is told to use.
 */

#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define OUTLINE static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

enum { F32, BF16, F16 }; /* element types; always a constant where speed matters */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t size_of(int type) { return type == F32 ? 4 : 2; }
INLINE int64_t units_of(int64_t elements, int type) { return elements * size_of(type) / 4; }

INLINE char *at(const void *base, int64_t index, int type) {
    return (char *)base + index * size_of(type);
}

INLINE vf spread(float x) { return x - (vf){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE vf vmax(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

/* x in the first `count` lanes, `other` after them; any count, none or all lanes included. */
INLINE vf first_lanes(vf x, vf other, int64_t count) {
    vi lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    return pick(lane < (int32_t)min64(count, LANES), x, other);
}

/* bf16 is the upper half of an fp32. */
INLINE vu widen(vh x) {
#if LANES == 16
    return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#elif LANES == 8
    return (vu)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, vu);
#endif
}

INLINE vf load_f32(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_f32(float *p, vf x) { memcpy(p, &x, sizeof x); }

/* Round to the nearest bf16, ties to even; NaN stays NaN. */
INLINE vh to_bf16(vf x) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu is_nan = (vu)(x != x);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), vh);
#endif
}

/* fp16, whose subnormals are numbers like others: moved to fp32's place and rebased by a product. */
INLINE vf from_f16(vh x) {
    vu bits = widen(x), magnitude = (bits & 0x7fff) << 13;
    vu is_special = (vu)(magnitude >= 0x0f800000); /* infinity, NaN */
    vu number = (vu)((vf)magnitude * 0x1p112f);
    vu result = (is_special & (magnitude | 0x7f800000)) | (~is_special & number);
    return (vf)(result | (bits & 0x8000) << 16);
}

/* Round to the nearest fp16, ties to even; what is too large becomes infinity, NaN stays NaN.
 * Below fp16's normal numbers the addition of 0.5 rounds to multiples of 2^-24, fp16's smallest. */
INLINE vh to_f16(vf x) {
    vu bits = (vu)x, magnitude = bits & 0x7fffffff;
    vu normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    vu tiny = (vu)((vf)magnitude + 0.5f) - 0x3f000000;
    vu is_tiny = (vu)(magnitude < 0x38800000), is_large = (vu)(magnitude >= 0x477ff000);
    vu result = (is_tiny & tiny) | (~is_tiny & normal);
    result = (is_large & (0x7c00 + ((vu)(x != x) & 0x200))) | (~is_large & result);
    return __builtin_convertvector(result | ((bits >> 16) & 0x8000), vh);
}

/* `count` elements as fp32, zeros after them. */
INLINE vf load(const void *p, int64_t count, int type) {
    char part[4 * LANES];
    if (count < LANES) {
        memset(part, 0, sizeof part);
        memcpy(part, p, count * size_of(type));
        p = part;
    }
    if (type == F32) return load_f32(p);
    vh half;
    memcpy(&half, p, sizeof half);
    return type == F16 ? from_f16(half) : (vf)(widen(half) << 16);
}

INLINE void store(void *p, vf x, int64_t count, int type) {
    int64_t bytes = min64(count, LANES) * size_of(type);
    vh half = type == F16 ? to_f16(x) : to_bf16(x);
    const void *from = type == F32 ? (const void *)&x : (const void *)&half;
    if (bytes == LANES * size_of(type)) memcpy(p, from, LANES * size_of(type));
    else memcpy(p, from, bytes);
}
