// out[t, n] = epilogue(sum_k x[t, k] w[n, k]), x [tokens, K], w [n, K] stored in two bytes in fragment order; see _cluster_linear.py.
//
// Two blocks of a cluster take neighbouring tiles of 128 weight rows and the same BT tokens: each copies its weights, and half of the tile of x for
// both. In a block one thread copies (a ring of STAGES steps of 64 columns) and two groups of four warps multiply, 64 weight rows each: a thread
// joins the weights it owns into the registers of the matrix unit, the next step's while the unit works on this one's. So the product is
// out^T = W x^T: M of the matrix instruction is weight rows (A, from registers), N is tokens (B, from shared memory), sums are [64, BT] of a group.
// Given by the launcher: BT, STAGES, FORMAT (1 E4M3, 2 E5M2), BF16, ACTIVATION (0: none, else gated) and the function `mma`.
//
// A place of the ring has two barriers. `full`: 1 arrival, the copying thread's, and the bytes of the two or three copies of its own block and of the
// other block's half of x, which may come first. `empty`: 4 arrivals, one of each multiplying group of both blocks, since a place is written from both.
// Parts of a box outside of the tensor are written as zeros and counted as bytes, so edges, and a second tile where tiles are odd, need no care.
// All threads of both blocks must read the same `precision[layer]`: it may change between launches only.
//
// In this file: PTX; weights to registers (`join`, `take`); the loop over steps (`issue`, `finish`, `sum_up`); numbers; the kernel (copies,
// sums of ranges of K, epilogue).
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned char u8; typedef unsigned short u16; typedef signed char i8;
struct alignas(64) TensorMap { u8 bytes[128]; };

#define ROWS 128
#define BK 64
#define W_BYTES (ROWS * BK)                            // of one plane, upper or lower
#define X_BYTES (BT * BK * 2)
#define ACCS (BT / 2)
#define STAGE_BYTES (2 * W_BYTES + X_BYTES)            // upper, lower (left alone in fast precision), x
#define OUT_TOKENS 64                                  // staged for the store at one time, for each group
#define OUT_BYTES (OUT_TOKENS * 128)                   // of 64 columns (gated: 32)

// ---- PTX

__device__ __forceinline__ u32 smem_of(const void* p) { u32 a; asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(a) : "l"(p)); return a; }
__device__ __forceinline__ u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 phase) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" :: "r"(bar), "r"(phase) : "memory");
}
// One arrival at the barrier of the same place in block `rank` of the cluster. No `.release.cluster`: that waits for all memory of the device. What is to be
// ordered are reads of a place before the copies that follow, and those are done when the matrix unit is.
__device__ __forceinline__ void bar_arrive(u32 bar, u32 rank) {
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}" :: "r"(bar), "r"(rank) : "memory");
}
__device__ __forceinline__ void copy_2d(u32 to, const TensorMap* map, u32 bar, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" :: "r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void copy_4d(u32 to, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" :: "r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
// The same place and the same barrier in both blocks.
__device__ __forceinline__ void copy_2d_both(u32 to, const TensorMap* map, u32 bar, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" :: "r"(to), "l"(map), "r"(bar), "h"((u16)3), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ uint4 load_16(u32 at) { uint4 v; asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory"); return v; }

// ---- weights to registers

// Four stored weights (bytes of u and l) to two registers of two numbers: columns 2c and 2c + 1, then 8 further on. A lower byte of 128 or more stands for
// itself less 256, so the upper byte is one less; E4M3 bytes are moved to the place of float16's exponent. Fast: the upper byte alone, as `dual_linear` says.
template <bool FULL> __device__ __forceinline__ void join(u32 u, u32 l, u32& low, u32& high) {
  u32 a, b;
  if (FULL) {
    u32 v = u - ((l >> 7) & 0x01010101u);
#if FORMAT == 1
    v = (u & 0x80808080u) | ((v >> 1) & 0x3F3F3F3Fu);
#endif
    a = __byte_perm(l, v, 0x5140); b = __byte_perm(l, v, 0x7362);
  } else {
    a = __byte_perm(u, 0, 0x1404); b = __byte_perm(u, 0, 0x3424);
#if FORMAT == 1
    a = (a & 0x80008000u) | ((a >> 1) & 0x3F803F80u); b = (b & 0x80008000u) | ((b >> 1) & 0x3F803F80u);
#endif
  }
#if BF16
  asm("{.reg .b16 x, y; .reg .f32 f, g; mov.b32 {x, y}, %1; cvt.f32.f16 f, x; cvt.f32.f16 g, y; cvt.rn.bf16x2.f32 %0, g, f;}" : "=r"(low) : "r"(a));
  asm("{.reg .b16 x, y; .reg .f32 f, g; mov.b32 {x, y}, %1; cvt.f32.f16 f, x; cvt.f32.f16 g, y; cvt.rn.bf16x2.f32 %0, g, f;}" : "=r"(high) : "r"(b));
#else
  low = a; high = b;
#endif
}

// The weights of one step that this thread feeds to the matrix unit, rows `row` and `row + 8`: w[4 s .. 4 s + 3] for its s-th instruction, 16 columns deep.
// 16 bytes of a row in fragment order are what one thread needs of it.
template <bool FULL> __device__ __forceinline__ void take(u32 stage, u32 own, u32 (&w)[16]) {
  uint4 u0 = load_16(stage + own), u1 = load_16(stage + own + 8 * BK), l0 = {}, l1 = {};
  if (FULL) { l0 = load_16(stage + W_BYTES + own); l1 = load_16(stage + W_BYTES + own + 8 * BK); }
  join<FULL>(u0.x, l0.x, w[0], w[2]);   join<FULL>(u1.x, l1.x, w[1], w[3]);
  join<FULL>(u0.y, l0.y, w[4], w[6]);   join<FULL>(u1.y, l1.y, w[5], w[7]);
  join<FULL>(u0.z, l0.z, w[8], w[10]);  join<FULL>(u1.z, l1.z, w[9], w[11]);
  join<FULL>(u0.w, l0.w, w[12], w[14]); join<FULL>(u1.w, l1.w, w[13], w[15]);
}

// ---- the loop over steps

__device__ __forceinline__ u64 describe(u32 at) {  // K-major, rows of 128 bytes, swizzled in groups of 8 rows, 1,024 bytes apart
  return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
@MMA@

// One step: four instructions, which go on after this; `first` starts the sums anew.
__device__ __forceinline__ void issue(float (&acc)[ACCS], const u32 (&w)[16], u32 x_tile, bool first) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < 4; ++s) mma(acc, w[4 * s], w[4 * s + 1], w[4 * s + 2], w[4 * s + 3], describe(x_tile + 32 * s), !(first && s == 0));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for them; the empty asm keeps the compiler from touching what they write and read before.
__device__ __forceinline__ void finish(float (&acc)[ACCS], u32 (&w)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < ACCS; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(w[i])::"memory");  // read until now
}

// acc = the sums over `steps` steps, at least one. `turn` counts steps of all work items: it names the place (turn % STAGES) and its phase. A place is given
// back behind `finish`: the instructions are those of all four warps, so each has taken its weights by then, and one thread may speak for all.
template <bool FULL> __device__ __forceinline__ void sum_up(float (&acc)[ACCS], u32 ring, u32 full_bars, u32 empty_bars, u32 own, int steps, u32& turn, bool leader) {
  u32 even[16], odd[16];
  u32 stage = turn % STAGES;
  bar_wait(full_bars + 8 * stage, turn / STAGES & 1);
  take<FULL>(ring + stage * STAGE_BYTES, own, even);
  for (int step = 0; step < steps; step += 2) {
    stage = turn % STAGES;
    issue(acc, even, ring + stage * STAGE_BYTES + 2 * W_BYTES, step == 0);
    if (step + 1 < steps) {
      u32 next = (turn + 1) % STAGES;
      bar_wait(full_bars + 8 * next, (turn + 1) / STAGES & 1);
      take<FULL>(ring + next * STAGE_BYTES, own, odd);
    }
    finish(acc, even);
    if (leader) { bar_arrive(empty_bars + 8 * stage, 0); bar_arrive(empty_bars + 8 * stage, 1); }
    ++turn;
    if (step + 1 < steps) {
      stage = turn % STAGES;
      issue(acc, odd, ring + stage * STAGE_BYTES + 2 * W_BYTES, false);
      if (step + 2 < steps) {
        u32 next = (turn + 1) % STAGES;
        bar_wait(full_bars + 8 * next, (turn + 1) / STAGES & 1);
        take<FULL>(ring + next * STAGE_BYTES, own, even);
      }
      finish(acc, odd);
      if (leader) { bar_arrive(empty_bars + 8 * stage, 0); bar_arrive(empty_bars + 8 * stage, 1); }
      ++turn;
    }
  }
}

// ---- numbers

// 1 silu, 2 gelu with tanh, 3 gelu.
__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1
  return x / (1.0f + __expf(-x));
#elif ACTIVATION == 2
  float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + __expf(-2.0f * inner));
#else
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
#endif
}
__device__ __forceinline__ u16 narrow(float x) {
  u16 h;
#if BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
#endif
  return h;
}
__device__ __forceinline__ float wide(u16 h) {
  float x;
#if BF16
  u32 bits = (u32)h << 16; x = __uint_as_float(bits);
#else
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
#endif
  return x;
}
__device__ __forceinline__ u32 pair(float x, float y) { return (u32)narrow(x) | (u32)narrow(y) << 16; }

// ---- the kernel

// Work item -> (token tile, pair of weight tiles, range of K). Eight token tiles go over all weights before the next eight: what they share stays in L2.
__device__ __forceinline__ void place(int item, int token_tiles, int pairs, int splits, int& t, int& p, int& split) {
  split = item % splits; item /= splits;
  const int GROUP = 8;
  int group = item / (GROUP * pairs), first = group * GROUP, size = min(GROUP, token_tiles - first), rest = item - group * GROUP * pairs;
  t = first + rest % size; p = rest / size;
}

// `outputs`: columns of out, half the weight rows when gated; `partial` and `counters` (zero before and after) where splits > 1. Every range has a step.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
nested_gemm(const __grid_constant__ TensorMap u_map, const __grid_constant__ TensorMap l_map, const __grid_constant__ TensorMap x_map,
            u16* out, const i8* shift, const u16* bias, float* partial, int* counters, const int* precision, int layer,
            int tokens, int outputs, int steps, int splits, int weight_tiles) {
  extern __shared__ u8 raw[];
  __shared__ int last_of[2];
  u32 base = (smem_of(raw) + 1023) & ~1023u;
  u32 ring = base, staging = base + STAGES * STAGE_BYTES, full_bars = staging + 2 * OUT_BYTES, empty_bars = full_bars + 8 * STAGES;
  u32 rank = cluster_rank();
  int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) { bar_init(full_bars + 8 * s, 1); bar_init(empty_bars + 8 * s, 4); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  int token_tiles = (tokens + BT - 1) / BT, pairs = (weight_tiles + 1) / 2;
  int items = token_tiles * pairs * splits, clusters = gridDim.x / 2;
  bool full = precision[layer] != 0;
  u32 turn = 0;
  if (group == 0) {  // copies
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int item = blockIdx.x / 2; item < items; item += clusters) {
        int t, p, split; place(item, token_tiles, pairs, splits, t, p, split);
        int tile = 2 * p + rank, first = (long long)steps * split / splits, end = (long long)steps * (split + 1) / splits;
        for (int step = first; step < end; ++step, ++turn) {
          u32 stage = turn % STAGES, at = ring + stage * STAGE_BYTES, bar = full_bars + 8 * stage;
          bar_wait(empty_bars + 8 * stage, (turn / STAGES & 1) ^ 1);  // passes at once in the first round
          bar_expect(bar, (full ? 2 : 1) * W_BYTES + X_BYTES);
#if ACTIVATION
          copy_4d(at, &u_map, bar, step * BK, 0, 0, tile * (ROWS / 16));
          if (full) copy_4d(at + W_BYTES, &l_map, bar, step * BK, 0, 0, tile * (ROWS / 16));
#else
          copy_2d(at, &u_map, bar, step * BK, tile * ROWS);
          if (full) copy_2d(at + W_BYTES, &l_map, bar, step * BK, tile * ROWS);
#endif
          copy_2d_both(at + 2 * W_BYTES + rank * (X_BYTES / 2), &x_map, bar, step * BK, t * BT + rank * (BT / 2));
        }
      }
    }
  } else {  // multiplies
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");  // 128 x 40 + 256 x 232 are the 384 x 168 of the launch
    int me = threadIdx.x % 128, lane = me % 32, warp = me / 32, half = group - 1;
    int row = half * 64 + warp * 16 + lane / 4;  // and the one 8 further on
    u32 own = row * BK + lane % 4 * 16;
    u32 mine = staging + half * OUT_BYTES;
    for (int item = blockIdx.x / 2; item < items; item += clusters) {
      int t, p, split; place(item, token_tiles, pairs, splits, t, p, split);
      int tile = 2 * p + rank, first = (long long)steps * split / splits, end = (long long)steps * (split + 1) / splits;
      float acc[ACCS];
      bool leader = me == 0;
      if (full) sum_up<true>(acc, ring, full_bars, empty_bars, own, end - first, turn, leader);
      else sum_up<false>(acc, ring, full_bars, empty_bars, own, end - first, turn, leader);
      if (splits > 1) {  // the last to come adds the ranges in order
        long long slot = ((long long)(t * pairs * 2 + tile) * 2 + half) * splits;
        float* part = partial + slot * (64 * BT) + me;
#pragma unroll
        for (int i = 0; i < ACCS; ++i) part[split * (64 * BT) + i * 128] = acc[i];
        __threadfence();
        asm volatile("bar.sync %0, 128;" :: "r"(1 + half) : "memory");
        if (me == 0) last_of[half] = atomicAdd(counters + (t * pairs * 2 + tile) * 2 + half, 1) == splits - 1;
        asm volatile("bar.sync %0, 128;" :: "r"(1 + half) : "memory");
        if (!last_of[half]) continue;
        __threadfence();
        if (me == 0) counters[(t * pairs * 2 + tile) * 2 + half] = 0;
#pragma unroll
        for (int i = 0; i < ACCS; ++i) acc[i] = __ldcg(part + i * 128);
        for (int s = 1; s < splits; ++s)
#pragma unroll
          for (int i = 0; i < ACCS; ++i) acc[i] += __ldcg(part + s * (64 * BT) + i * 128);
      }
      // Epilogue: the thread has sums of weight rows `row` and `row + 8` for tokens 8 i + lane % 4 * 2 and the next, acc[4 i .. 4 i + 1] and acc[4 i + 2 .. 4 i + 3].
      // When gated, rows come as 8 gates and their 8 ups, so these are a gate and its up.
      float scale0 = 1.0f, scale1 = 1.0f;
#if ACTIVATION
      int n0 = tile * 64 + half * 32, column = n0 + warp * 8 + lane / 4;
      if (shift && column < outputs) { scale0 = exp2f((float)shift[column]); scale1 = exp2f((float)shift[outputs + column]); }
#else
      int n0 = tile * 128 + half * 64, column = n0 + warp * 16 + lane / 4;
      if (shift) { if (column < outputs) scale0 = exp2f((float)shift[column]); if (column + 8 < outputs) scale1 = exp2f((float)shift[column + 8]); }
      float add0 = 0.0f, add1 = 0.0f;
      if (bias) { if (column < outputs) add0 = wide(bias[column]); if (column + 8 < outputs) add1 = wide(bias[column + 8]); }
#endif
#pragma unroll
      for (int chunk = 0; chunk < BT / OUT_TOKENS; ++chunk) {
        asm volatile("bar.sync %0, 128;" :: "r"(1 + half) : "memory");  // the chunk before has been read
#pragma unroll
        for (int j = 0; j < OUT_TOKENS / 16; ++j) {  // 16 tokens
          u32 m[4];
          const int i = (chunk * (OUT_TOKENS / 8) + 2 * j) * 4;
#if ACTIVATION
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            float g0 = wide(narrow(acc[i + 4 * b] * scale0)), g1 = wide(narrow(acc[i + 4 * b + 1] * scale0));
            float u0 = wide(narrow(acc[i + 4 * b + 2] * scale1)), u1 = wide(narrow(acc[i + 4 * b + 3] * scale1));
            m[b] = pair(wide(narrow(activate(g0))) * u0, wide(narrow(activate(g1))) * u1);
          }
          // rows of 64 bytes: 16-byte piece `warp` of token; pieces are turned so that eight tokens meet no bank twice
          int token = j * 16 + lane % 16;
          u32 at = mine + token * 64 + ((warp ^ (token / 2 % 4)) * 16);
          asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" :: "r"(at), "r"(m[0]), "r"(m[1]) : "memory");
#else
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            m[2 * b] = pair(acc[i + 4 * b] * scale0 + add0, acc[i + 4 * b + 1] * scale0 + add0);
            m[2 * b + 1] = pair(acc[i + 4 * b + 2] * scale1 + add1, acc[i + 4 * b + 3] * scale1 + add1);
          }
          int token = j * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
          u32 at = mine + token * 128 + ((piece ^ (token % 8)) * 16);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
#endif
        }
        asm volatile("bar.sync %0, 128;" :: "r"(1 + half) : "memory");
        const int PIECES = ACTIVATION ? 4 : 8;
#pragma unroll
        for (int i = me; i < OUT_TOKENS * PIECES; i += 128) {
          int token = i / PIECES, piece = i % PIECES, at_token = t * BT + chunk * OUT_TOKENS + token, n = n0 + piece * 8;
          if (at_token < tokens && n < outputs) {
            int turned = ACTIVATION ? piece ^ (token / 2 % 4) : piece ^ (token % 8);
            uint4 v = load_16(mine + token * PIECES * 16 + turned * 16);
            *reinterpret_cast<uint4*>(out + (long long)at_token * outputs + n) = v;
          }
        }
      }
    }
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while the other block may still write to it or arrive at its barriers
}
