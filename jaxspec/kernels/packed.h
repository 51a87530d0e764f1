/* Weights as small as they came. A matrix [depth, width] is stored in panels of 32 columns; a panel is in one of these
   formats, in groups of 32 rows. Weights are widened to float32 in registers, to exactly the values of the `gguf`
   package. packed.py writes the buffers and describes their layout.

   A group of codes consists of words, 16 columns of 32 bits each: word i, half h is at 64 * (2 * i + h) bytes. A column's
   32 bits hold 8 codes of 4 bits, 4 of 8 bits or 2 of 16 bits: those of even rows in the lower half, of odd rows in the
   upper half, the first in its lowest bits. Bits above the lowest four are stored likewise, 32 rows of one bit or 16 of
   two in a column's 32 bits. */
#ifndef JAXSPEC_PACKED_H
#define JAXSPEC_PACKED_H

#include "kernel.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define PANEL 32
#define GROUP 32  /* rows */
#define SUPER 256 /* rows of a superblock of Q4_K, Q5_K, Q6_K */
#define COLUMNS (PANEL / WIDTH)
#define INLINE static inline __attribute__((always_inline))

/* Numbers as in packed.py. I8: codes of 8 bits with one float32 scale per column. */
enum Format { F32, BF16, F16, I8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, FORMATS };

/* Bytes at the begin of a panel, a superblock, a group: scales and minima. */
INLINE int panel_head(int format) { return format == I8 ? 4 * PANEL : 0; }
INLINE int super_head(int format) {
  return format == Q4_K || format == Q5_K ? 4 * PANEL : format == Q6_K ? 2 * PANEL : 0;
}
INLINE int group_head(int format) {
  if (format == Q4_1 || format == Q5_1) return 4 * PANEL;
  return format >= Q4_0 ? 2 * PANEL : 0;
}
/* Bytes of a group's bits above the lowest four, and of its codes. */
INLINE int high_bytes(int format) {
  if (format == Q5_0 || format == Q5_1 || format == Q5_K) return GROUP * PANEL / 8;
  return format == Q6_K ? GROUP * PANEL / 4 : 0;
}
INLINE int code_bytes(int format) {
  if (format == F32) return 4 * GROUP * PANEL;
  if (format == BF16 || format == F16) return 2 * GROUP * PANEL;
  return format == I8 || format == Q8_0 ? GROUP * PANEL : GROUP * PANEL / 2;
}
INLINE int group_bytes(int format) { return group_head(format) + high_bytes(format) + code_bytes(format); }

/* Where the heads and codes of a group are. */
typedef struct {
  const uint8_t *panel, *super, *group, *high, *codes;
} Place;

/* The group that begins with row `d` of a panel. */
INLINE Place group_at(const int format, const uint8_t *panel, int64_t d) {
  const uint8_t *super = panel + panel_head(format);
  const uint8_t *group = super + d / GROUP * group_bytes(format);
  if (super_head(format)) {
    super += d / SUPER * (super_head(format) + SUPER / GROUP * group_bytes(format));
    group += (d / SUPER + 1) * super_head(format);
  }
  const uint8_t *high = group + group_head(format);
  return (Place){panel, super, group, high, high + high_bytes(format)};
}

/* WIDTH floats from float16. */
INLINE vec from_float16(const uint8_t *p) {
#if WIDTH == 16
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif WIDTH == 8 && defined(__F16C__)
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  /* Exponent and fraction moved into place and the exponent's bias corrected; subnormal numbers are computed, because
     XLA's threads take those of float32 as zero. Infinities and NaNs, which no weight is, become large numbers. */
  typedef uint16_t shorts __attribute__((vector_size(2 * WIDTH), aligned(1), may_alias));
  ints bits = __builtin_convertvector(*(const shorts *)p, ints), fraction = bits & 0x3ff;
  ints normal = ((bits & 0x7fff) << 13) + (112 << 23), is_small = (bits & 0x7c00) == 0;
  vec small = __builtin_convertvector(fraction, vec) * 0x1p-24f;
  return (vec)((((ints)small & is_small) | (normal & ~is_small)) | (bits & 0x8000) << 16);
#endif
}
INLINE vec from_uint8(const uint8_t *p) { return __builtin_convertvector(*(const bytes *)p, vec); }
INLINE vec from_int8(const uint8_t *p) {
  typedef int8_t signed_bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
  return __builtin_convertvector(*(const signed_bytes *)p, vec);
}

/* Codes of 4 bits minus `zero`, from the lowest bits of each column. */
INLINE vec from_nibbles(ints word, int zero) {
#if WIDTH == 16
  static const float values[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  __m512 table = _mm512_sub_ps(_mm512_loadu_ps(values), _mm512_set1_ps((float)zero));
  return (vec)_mm512_permutexvar_ps((__m512i)word, table); /* reads the four lowest bits only */
#else
  return __builtin_convertvector((word & 15) - zero, vec);
#endif
}

/* Codes of 8 bits, bits `low` to `low + 7` of each column. A sum of four products, three of them with 0, replaces two
   shifts. */
INLINE vec from_bytes(ints word, const int low) {
#if WIDTH == 16 && defined(__AVX512VNNI__)
  return (vec)_mm512_cvtepi32_ps(
      _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi32(1 << low), (__m512i)word));
#else
  return __builtin_convertvector((word << (24 - low)) >> 24, vec);
#endif
}

/* A group's scales and minima: weight = code * scale + minimum. */
typedef struct {
  vec scale[COLUMNS], minimum[COLUMNS];
} Scales;

/* The code that stands for weight 0, of formats without minimum. */
INLINE int zero_code(int format) { return format == Q4_0 ? 8 : format == Q5_0 ? 16 : format == Q6_K ? 32 : 0; }
INLINE int has_minimum(int format) { return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K; }

/* Scales and minima of `count` vectors of a group's columns, from vector `begin` on; for Q6_K scales of its rows from
   16 * `half` on. */
INLINE void read_scales(const int format, Place at, int half, int begin, const int count, Scales *to) {
  UNROLL for (int c = 0; c < count; c++) {
    const int first = (begin + c) * WIDTH;
    if (format == I8) to->scale[c] = *(const vec *)(at.panel + 4 * first);
    if (format >= Q4_0 && format <= Q8_0) to->scale[c] = from_float16(at.group + 2 * first);
    if (format == Q4_1 || format == Q5_1) to->minimum[c] = from_float16(at.group + 2 * (PANEL + first));
    if (format == Q4_K || format == Q5_K) {
      to->scale[c] = from_float16(at.super + 2 * first) * from_uint8(at.group + first);
      to->minimum[c] = -(from_float16(at.super + 2 * (PANEL + first)) * from_uint8(at.group + PANEL + first));
    }
    if (format == Q6_K)
      to->scale[c] = from_float16(at.super + 2 * first) * from_int8(at.group + PANEL * half + first);
  }
}

/* A pointer to the same memory, of which the compiler does not know that. So it reads the memory again, where it would
   keep what it has read in a register and save another to the stack. */
#define READ_AGAIN(pointer, memory) __asm__("" : "+r"(pointer) : "m"(memory))

/* `use_group` in formats of codes and float16. */
INLINE void use_codes(const int format, const int rows, int begin, const int count, Place at, const float *x,
                      int64_t stride, vec (*sum)[COLUMNS], float *to) {
  /* narrow: sums take many of 16 registers. shared: the strip's columns take turns with each value of x. */
  const int zero = zero_code(format), narrow = WIDTH != 16 && rows, shared = narrow && rows > 2;
  const int per_word = GROUP * 4 * PANEL / code_bytes(format), words = GROUP / per_word;
  Scales s = {0};
  ints bits[COLUMNS] = {0};
  for (int i = 0; i < words; i++) {
    const uint8_t *word = at.codes + 4 * PANEL * i;
    if (i == 0 || (format == Q6_K && i % 2 == 0)) read_scales(format, at, i / 2, begin, count, &s);
    UNROLL for (int c = 0; c < count; c++) {
      const int first = (begin + c) * WIDTH;
      if (format == Q6_K && i % 2 == 0)
        bits[c] = *(const ints *)(at.high + 4 * (PANEL * (i / 2) + first));
      else if (high_bytes(format)) /* the bits of this word's rows are the lowest of each half */
        bits[c] = i ? bits[c] >> (format == Q6_K ? 8 : 4) : *(const ints *)(at.high + 4 * first);
    }
    UNROLL for (int j = 0; j < per_word; j++) {
      const int row = i * per_word + j, low = 16 * (j % 2) + j / 2 * (32 / per_word);
      vec weight[COLUMNS];
      UNROLL for (int c = 0; c < count; c++) {
        const int first = (begin + c) * WIDTH;
        const uint8_t *codes = word;
        if (narrow && count != 2) READ_AGAIN(codes, *codes);
        ints w = *(const ints *)(codes + 4 * first);
        if (format == F16) { /* rows of 32 columns, not words */
          weight[c] = from_float16(word + 2 * (PANEL * j + first));
        } else {
          vec code;
          if (format == I8 || format == Q8_0) {
            code = from_bytes(w, low);
          } else if (high_bytes(format)) {
            const int bit = 16 * (j % 2) + j / 2 * (format == Q6_K ? 2 : 1), mask = format == Q6_K ? 48 : 16;
            ints above;
            if (bit < 4)
              above = bits[c] << (4 - bit);
            else
              above = bits[c] >> (bit - 4);
            code = __builtin_convertvector((((w >> low) & 15) | (above & mask)) - zero, vec);
          } else {
            code = from_nibbles(w >> low, zero);
          }
          const vec *minimum = s.minimum;
          if (narrow && count == 2 && rows == 4) READ_AGAIN(minimum, s.minimum);
          weight[c] = code * s.scale[c];
          if (has_minimum(format)) weight[c] += minimum[c];
        }
        if (to) *(vec *)(to + row * PANEL + first) = weight[c];
        if (!shared) UNROLL for (int r = 0; r < rows; r++) sum[r][c] += weight[c] * x[r * stride + row];
      }
      if (shared) UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < count; c++)
          sum[r][c] += weight[c] * x[r * stride + row];
    }
  }
}

/* `use_group` in float32 and bfloat16, which need no scales. */
INLINE void use_floats(const int format, const int rows, int begin, const int count, Place at, const float *x,
                       int64_t stride, vec (*sum)[COLUMNS], float *to) {
  const int per_word = format == F32 ? 1 : 2;
  for (int i = 0; i < GROUP / per_word; i++)
    UNROLL for (int j = 0; j < per_word; j++) UNROLL for (int c = 0; c < count; c++) {
      const int row = i * per_word + j, first = (begin + c) * WIDTH;
      ints word = *(const ints *)(at.codes + 4 * (PANEL * i + first));
      if (format == BF16 && j)
        word &= (int32_t)0xffff0000;
      else if (format == BF16)
        word <<= 16;
      if (to) *(vec *)(to + row * PANEL + first) = (vec)word;
      UNROLL for (int r = 0; r < rows; r++) sum[r][c] += (vec)word * x[r * stride + row];
    }
}

/* Vectors of columns for `use_group`. AVX2 has 16 registers. A sum takes one addition after another, four cycles each, so
   eight sums at a time are wanted at least; but scales and minima of all columns leave no room for them. Few rows of
   float32 and bfloat16, which have no scales, wait for memory, which is read best in order. Not measured with SSE2 and
   NEON. */
INLINE int strip_of(int format, int rows) {
  if (WIDTH == 16 || rows <= 2 || (format == F32 && rows <= 5) || (format == BF16 && rows <= 4)) return COLUMNS;
  return rows <= 4 || (rows == 5 && !has_minimum(format)) ? COLUMNS / 2 : COLUMNS / 4;
}

/* Widens `count` vectors of a group's columns to float32, from vector `begin` on, and uses each weight: written to `to`
   [32, 32] if given, and multiplied with row r of x, x[r * stride + row], added to sum[r] for r < rows. Call with constant
   `format`, `rows` and `count` = `strip_of` them. */
INLINE void use_group(const int format, const int rows, int begin, const int count, Place at, const float *x,
                      int64_t stride, vec (*sum)[COLUMNS], float *to) {
  const int half = COLUMNS / 2;
  if (format == F32 || format == BF16) {
    use_floats(format, rows, begin, count, at, x, stride, sum, to);
  } else if (WIDTH != 16 && rows == 2) { /* two strips, each for all groups, take 1.06 times as long */
    use_codes(format, rows, 0, half, at, x, stride, sum, to);
    use_codes(format, rows, half, half, at, x, stride, (vec(*)[COLUMNS]) & sum[0][half], to);
  } else {
    use_codes(format, rows, begin, count, at, x, stride, sum, to);
  }
}

#endif
