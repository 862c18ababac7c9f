// What products with adapters share: the places that rows have, and B's columns. Behind hopper.cuh.

// Places of adapters, as bits.
struct Places {
    unsigned low = 0, high = 0;

    __device__ __forceinline__ void add(int place) {
        if (place >= 0) (place < 32 ? low : high) |= 1u << (place & 31);
    }
    // Those that any of a warp's threads has.
    __device__ __forceinline__ u64 of_warp() {
        asm volatile("redux.sync.or.b32 %0, %0, 0xffffffff;" : "+r"(low));
        asm volatile("redux.sync.or.b32 %0, %0, 0xffffffff;" : "+r"(high));
        return (u64)high << 32 | low;
    }
};

// Lines of 32 bytes, of which eight stand together with their pieces of 16 bytes exchanged.
__device__ __forceinline__ u64 narrow_descriptor(unsigned address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)16 << 32 | (u64)3 << 62;
}
