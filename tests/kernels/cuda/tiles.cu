// Kernels that test the launcher: a copy of tiles by the tensor memory accelerator, and a predecessor that writes late.

struct alignas(64) TensorMap {
    char bytes[128];
};

static __device__ unsigned long long nanoseconds() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Copies tiles of ROWS x 64 elements of 16 bits, one a block, to out, [rows, columns] without gaps.
// started: when the first block began, before it waited for the previous kernel.
extern "C" __global__ void copy_tiles(const __grid_constant__ TensorMap map, unsigned short* out, unsigned long long* started,
                                      int rows, int columns) {
    extern __shared__ __align__(1024) unsigned short space[];
    __shared__ __align__(8) unsigned long long barrier;
    asm volatile("griddepcontrol.launch_dependents;");
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *started = nanoseconds();
    // The last tile that fits, so that all of the shared memory is there.
    unsigned short* tile = space + (OFFSET / 2);
    unsigned bar = __cvta_generic_to_shared(&barrier), to = __cvta_generic_to_shared(tile);
    int row = blockIdx.y * ROWS, column = blockIdx.x * 64;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(ROWS * 128));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                     "l"(&map), "r"(column), "r"(row), "r"(bar)
                     : "memory");
    }
    __syncthreads();
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(bar)
        : "memory");
    for (int i = threadIdx.x; i < ROWS * 64; i += blockDim.x) {
        int r = i / 64, c = i % 64;
        if (row + r < rows && column + c < columns)
            // The swizzle: pieces of 16 bytes change places within a row of 128.
            out[(long long)(row + r) * columns + column + c] = tile[r * 64 + (c ^ (r % 8) * 8)];
    }
}

// Lets the next kernel start, and adds 1 to each element after some time. ended: when.
extern "C" __global__ void add_late(unsigned short* x, unsigned long long* ended, int count, int wait) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    unsigned long long until = nanoseconds() + wait;
    while (nanoseconds() < until)
        __nanosleep(1000);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        x[i] += 1;
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *ended = nanoseconds();
}
