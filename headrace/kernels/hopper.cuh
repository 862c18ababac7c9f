// Functions that kernels for Hopper GPUs (sm_90a) share: barriers, tiles by the tensor memory accelerator, products of groups of
// four warps, blocks of a cluster, and numbers of 16 bits.
//
// Constant: PACKED_KIND, that of the numbers that a source packs (1 float16, else bfloat16). Without it there are no such functions.

typedef unsigned long long u64;

struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return (unsigned)__cvta_generic_to_shared(place);
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

#ifdef PACKED_KIND
__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned both;
#if PACKED_KIND == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
#endif

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
