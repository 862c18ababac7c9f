// What kernels of decode rows share: pages of a cache with heads of 128 channels in 16 bits. Behind hopper.cuh.

typedef unsigned short u16;

#define INFINITY_ __int_as_float(0x7f800000)

constexpr int WIDTH = 128, PAGE = 16, PAGE_BYTES = PAGE * 2 * WIDTH * 2;
constexpr int PART = PAGE * 128;  // bytes of a line of 128 bytes of each token: half of the keys or values

__device__ __forceinline__ void load_page(unsigned to, const TensorMap& map, unsigned barrier, int head, int block, u64 policy) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "n"(PAGE_BYTES) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %3, %3, %4, %5}], [%2], %6;"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(0), "r"(head), "r"(block), "l"(policy) : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned place) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place) : "memory");
}

__device__ __forceinline__ void load_turned(unsigned (&to)[4], unsigned place) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place) : "memory");
}

__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}
