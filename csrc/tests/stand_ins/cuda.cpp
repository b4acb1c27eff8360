// Stands in for libcuda.so.1: contexts, without a GPU.
extern "C" {

thread_local void* current = nullptr;

int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}

int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}

}  // extern "C"
