// Functions that kernels for Hopper GPUs (sm_90a) share: barriers, tiles by the tensor memory accelerator, products of groups of
// four warps and of one warp, blocks of a cluster, and numbers of 16 bits.
//
// Constant: PACKED_KIND, that of the numbers that `packed` packs (1 float16, else bfloat16). Without it there is no `packed`.

typedef unsigned long long u64;

struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return (unsigned)__cvta_generic_to_shared(place);
}

template <int ARRIVALS> __device__ __forceinline__ void init_barrier(unsigned barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "n"(ARRIVALS) : "memory");
}

// Lets other threads, and the tensor memory accelerator, use the barriers that this thread has initialised.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and adds the bytes to those that the barrier waits for.
__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void load_tile(unsigned to, const TensorMap& map, unsigned barrier, int channel, int line, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(channel), "r"(line), "l"(policy) : "memory");
}

// Lines of 128 bytes, of which eight stand together with their pieces of 16 bytes exchanged.
__device__ __forceinline__ u64 descriptor(unsigned address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// Operands of an instruction: four or sixteen sums of a thread.
#define D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(d, i) D4(d, i), D4(d, i + 4), D4(d, i + 8), D4(d, i + 12)

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_multiplied() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// The compiler moves no use of the sums past this: it does not know that they are written until the wait is over.
template <int COUNT> __device__ __forceinline__ void settle(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

// The address of a place in another block's shared memory.
__device__ __forceinline__ unsigned place_of(unsigned place, unsigned block) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(block));
    return there;
}

__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Numbers of 16 bits have the kind 1, float16, or another, bfloat16.
template <int KIND_> __device__ __forceinline__ unsigned packed_as(float low, float high) {
    unsigned both;
    if constexpr (KIND_ == 1)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

#ifdef PACKED_KIND
__device__ __forceinline__ unsigned packed(float low, float high) { return packed_as<PACKED_KIND>(low, high); }
#endif

// The number in the lower half of a word, whose upper half is 0.
template <int KIND_> __device__ __forceinline__ float wide_of(unsigned bits) {
    if constexpr (KIND_ != 1) return __uint_as_float(bits << 16);
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)bits));
    return wide;
}

// Adds the product of 16 rows and 8 columns over 16 numbers.
template <int KIND_>
__device__ __forceinline__ void multiply_16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    if constexpr (KIND_ == 1)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : D4(d, 0) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : D4(d, 0) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void store_shared(unsigned place, float value) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(place), "f"(value) : "memory");
}

__device__ __forceinline__ void load_shared(float* four, unsigned place) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3]) : "r"(place) : "memory");
}

__device__ __forceinline__ float silu(float x) {
    float sigmoid;
    asm("{\n.reg .f32 t;\nmul.ftz.f32 t, %1, 0fBFB8AA3B;\nex2.approx.ftz.f32 t, t;\nadd.ftz.f32 t, t, 0f3F800000;\n"
        "rcp.approx.ftz.f32 %0, t;\n}\n" : "=f"(sigmoid) : "f"(x));
    return x * sigmoid;
}
