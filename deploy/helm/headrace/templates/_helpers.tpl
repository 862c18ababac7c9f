{{- define "headrace.labels" -}}
app: {{ .Release.Name }}
{{- end }}

{{- /* One argument a line: the options of `headrace serve`. */ -}}
{{- define "headrace.options" -}}
{{- range $name, $value := .Values.options }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%v" $name . | quote }}
{{- end }}
{{- else if kindIs "map" $value }}
- {{ printf "--%s=%s" $name (toJson $value) | quote }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%s" $name ($value | toJson) | quote }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}
