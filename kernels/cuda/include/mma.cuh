// Tensor-core products of sm_80 and later, one function an instruction. Shared memory is addressed by 32-bit byte addresses. All
// lanes of a warp must call a function that says "warp".
//
// A fragment is a warp's share of a small matrix; lane = 4 * g + t holds, of element pairs (columns 2t and 2t + 1):
//
//     a (16 x 16): row g, row g + 8, row g of columns 8.., row g + 8 of columns 8..
//     b (16 x 8):  rows 2t and 2t + 1 of column g, the same of rows 8..
//     c (16 x 8):  row g, row g + 8
//
// so two neighbouring c, rounded to bf16, are an a: a product's result is the next one's left factor without leaving the lane.
//
// Of tf32, fp32 with 10 bits of mantissa, a is 16 x 8 and b 8 x 8, and a lane holds single elements:
//
//     a (16 x 8): row g of column t, row g + 8, row g of column t + 4, row g + 8 of it
//     b (8 x 8):  rows t and t + 4 of column g
//
// A row of 16 bytes is 4 of them, so ldmatrix_x4 loads these as it loads bf16: value[m] is row g, column t of matrix m.
#pragma once

#include "copies.cuh"
#include "vectors.cuh"

// Warp: four 8 x 8 matrices of bf16, lane i giving the address of row i % 8 of matrix i / 8. value[m]: row g, columns 2t and
// 2t + 1 of matrix m.
inline void ldmatrix_x4(unsigned (&value)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                 : "r"(row)
                 : "memory");
}

// Warp: the same of the transposed matrices, value[m]: rows 2t and 2t + 1 of column g.
inline void ldmatrix_x4_trans(unsigned (&value)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                 : "r"(row)
                 : "memory");
}

// Warp: c += a b, bf16 factors, fp32 sums.
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Warp: the same, tf32 factors.
inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounded to tf32, off by 2^-11 of x at most; without it a product would drop the bits, twice as far off and to one side. The
// inner product has no room for the 13 last bits of x: what it holds beyond 2^13 x is x rounded, to nearest but for the last
// 2^-12 below a power of 2. Two instructions, where cvt.rna.tf32 takes two and a move. Beyond 2^114 it may overflow.
inline unsigned to_tf32(float x) { return __float_as_uint(__fmaf_rn(x, -8192.0f, __fmul_rn(x, 8193.0f))); }

// 2^x to 2 units in the last place; 0 of -inf.
inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
