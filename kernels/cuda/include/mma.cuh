// Tensor-core instructions of sm_80 and later, one function each. Shared memory is addressed by 32-bit byte
// addresses. A function marked "warp" must be called by all lanes.
//
// A fragment is a lane's part of a matrix. Lane 4 g + t holds
// pairs of elements, columns 2t and 2t + 1 (rows for b):
//
//     a (16 x 16): row g, row g + 8, row g of columns 8.., row g + 8 of columns 8..
//     b (16 x 8):  rows 2t and 2t + 1 of column g, the same of rows 8..
//     c (16 x 8):  row g, row g + 8
//
// Two neighbouring c, rounded to bf16, are an a. So an accumulator becomes the next MMA's A operand in place.
//
// tf32 is fp32 with 10 bits of mantissa. Its a is 16 x 8, its b 8 x 8, and a lane holds single elements:
//
//     a (16 x 8): row g of column t, row g + 8, row g of column t + 4, row g + 8 of it
//     b (8 x 8):  rows t and t + 4 of column g
//
// A row of 16 bytes is 4 of them, so ldmatrix_x4 loads them as well: value[m] is row g, column t of matrix m.
#pragma once

#include "copies.cuh"
#include "vectors.cuh"

// Warp: loads four 8 x 8 matrices of bf16. Lane i passes the address of row i
// % 8 of matrix i / 8. value[m] is row g, columns 2t and 2t + 1 of matrix m.
inline void ldmatrix_x4(unsigned (&value)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                 : "r"(row)
                 : "memory");
}

// Warp: ldmatrix_x4 of the transposed matrices. value[m] is rows 2t and 2t + 1 of column g.
inline void ldmatrix_x4_trans(unsigned (&value)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                 : "r"(row)
                 : "memory");
}

// Warp: c += a b, bf16 operands, fp32 accumulators.
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Warp: c += a b, tf32 operands, fp32 accumulators.
inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds x to tf32, with an error of at most 2^-11 |x|. An MMA alone would truncate, with
// twice the error and a bias. Veltkamp's splitting: 8193 x is rounded to 24 bits and loses the 13 last
// bits of x. Subtracting 8192 x leaves x rounded to nearest. Just below a power of 2 (by less than
// 2^-12 of it) 8193 x has the next exponent, and x is rounded to one bit less.
// This takes two instructions; cvt.rna.tf32 takes two and a move. It may overflow above 2^114.
inline unsigned to_tf32(float x) { return __float_as_uint(__fmaf_rn(x, -8192.0f, __fmul_rn(x, 8193.0f))); }

// 2^x, within 2 ulp. exp2_approx(-inf) is 0.
inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
