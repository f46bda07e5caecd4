// wgmma (sm_90a): matrix multiplication by a warpgroup,
// with its descriptors and fragments. One function each.
//
// A warpgroup is 4 consecutive warps; the number of its first warp is a multiple of 4.
//
// Tile: rows of 64 bf16, 128 bytes each, at a multiple of 1024 bytes, with the 128-byte
// swizzle: chunk c of row r, 16 bytes, is at chunk c ^ (r % 8). TMA writes it so, and wgmma
// reads it so. 8 rows of one column then lie in different banks. A wider row is several tiles.
//
// Product: d (64 x N) += a (64 x 16) b (16 x N), bf16 operands, fp32 accumulators. Fragments
// are mma.cuh's, with 64 rows: warp w of the warpgroup has rows 16 w and following. Element
// d[4 j + e] is of row g (g + 8 for e >= 2) and column 8 j + 2 t (one more for odd e).
//
// An operand in shared memory is given by a descriptor of its tile. It is K-major by default: a row of the
// tile is a row of a or a column of b. It is MN-major if a tile row is one k:
// its 64 elements lie along M or N.
//
// wgmma is asynchronous. From its issue to wgmma_wait its registers and tiles must not be touched.
// warpgroup_fence_operand keeps the compiler from moving reads of an accumulator above the wait.
#pragma once

#include "mma.cuh"

constexpr int WARPGROUP = 4 * WARP;
constexpr int TILE_ROW_BYTES = 128, TILE_COLUMNS = TILE_ROW_BYTES / 2;

// The warp's number in its block. The shuffle tells the compiler that it is uniform
// over the warp. Addresses that derive from it then stay in uniform registers.
inline int warp_number() { return __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0); }

// Warp: stores four 8 x 8 matrices to shared memory, the counterpart of ldmatrix_x4.
inline void stmatrix_x4(unsigned row, const unsigned (&value)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(value[0]),
                 "r"(value[1]), "r"(value[2]), "r"(value[3])
                 : "memory");
}

// Rounds accumulator elements 8 k .. 8 k + 7 to the A fragment of columns 16 k .. 16 k + 15.
template <int COUNT>
void round_fragment(unsigned (&a)[4], const float (&sum)[COUNT], int k) {
#pragma unroll
    for (int e = 0; e < 4; e++) a[e] = pack(sum[8 * k + 2 * e], sum[8 * k + 2 * e + 1]);
}

// Warpgroup: stores an A fragment's 64 rows to columns 16 k .. 16 k + 15 of a
// tile, k < 4. `rows`: the address of the first of these rows, a multiple of 1024.
inline void store_fragment(unsigned rows, int k, const unsigned (&a)[4]) {
    const unsigned lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane % 16;
    stmatrix_x4(rows + row * TILE_ROW_BYTES + ((2 * k + lane / 16) ^ lane % 8) * 16, a);
}

// wgmma's matrix descriptor of a tile (PTX ISA): address, stride of 1024
// bytes between groups of 8 rows, 128-byte swizzle. `leading_byte_offset`:
// for an MN-major operand wider than one tile, the bytes to its next tile.
inline unsigned long long tile_descriptor(unsigned tile, unsigned leading_byte_offset = 16) {
    return (tile & 0x3ffff) >> 4 | (unsigned long long)(leading_byte_offset >> 4) << 16 | 1024ull >> 4 << 32 |
           1ull << 62;
}

// The descriptor moved by `bytes`: 32 bytes are 16 columns, 2048 bytes are 16 rows.
inline unsigned long long advance(unsigned long long descriptor, int bytes) {
    return descriptor + (bytes >> 4);
}

// Before the first wgmma: orders earlier accesses to its registers.
inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma_commit ends a group. wgmma_wait waits until all but the last PENDING groups are complete.
inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Compiler fence: reads and writes of `sum` stay on their side of it.
template <int COUNT>
void warpgroup_fence_operand(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// d (64 x 192) = a b, or += if `add`. Both operands are in shared memory.
template <bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
void wgmma_ss(float (&d)[96], unsigned long long a, unsigned long long b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "%96, %97, add, 1, 1, %99, %100;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),
          "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),
          "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),
          "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),
          "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
        : "l"(a), "l"(b), "r"((int)add), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR));
}

// d (64 x 128) = a b, or += if `add`. Both operands are in shared memory.
template <bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
void wgmma_ss(float (&d)[64], unsigned long long a, unsigned long long b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, %67, %68;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"((int)add), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR));
}

// d (64 x 64) = a b, or += if `add`. Both operands are in shared memory.
template <bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
void wgmma_ss(float (&d)[32], unsigned long long a, unsigned long long b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, %35, %36;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"((int)add), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR));
}

// d (64 x 64) += a b, a in registers, b an MN-major tile.
inline void wgmma_rs(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
